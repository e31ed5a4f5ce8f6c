"""What a checkpoint says of how text is made with it: its ends of text, and how tokens are chosen."""

import json
from pathlib import Path
from typing import Any

from meshwright.config import Run
from meshwright.files import replace_text
from meshwright.hub.reader import read_config, read_optional
from meshwright.starting import tokenizer_of

GENERATION = "generation_config.json"
_OF_WRITERS = ("transformers_version", "_from_model_config")


def keep_generation(run: Run, folder: Path) -> None:
    """Copy what the checkpoint that a run starts from says, as it may be gone when the run is used.

    Nothing is done where the run has another tokenizer than the checkpoint, whose ids then mean something else.

    Arguments:
        run: that is about to start.
        folder: its directory.
    """
    init = run.model.init
    if init == "random" or run.tokenizer.kind != tokenizer_of(init):
        return
    if init.startswith("hf:"):
        said = read_optional(init, GENERATION)
        ends = said.get("eos_token_id", read_config(init).get("eos_token_id"))
        said = {key: value for key, value in said.items() if key not in _OF_WRITERS}
        said |= {} if ends is None else {"eos_token_id": ends}
    else:
        said = kept_generation(Path(init))
    if said:
        replace_text(folder / GENERATION, json.dumps(said, indent=2, ensure_ascii=False) + "\n")


def kept_generation(folder: Path) -> dict[str, Any]:
    """What `keep_generation` kept in a run directory; empty where nothing."""
    path = folder / GENERATION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def with_ends(tokens: dict[str, int], said: dict[str, Any]) -> dict[str, Any]:
    """Special tokens as configs name them, with all ends of text: the tokenizer's first.

    Arguments:
        tokens: from `meshwright.hub.tokenizer_files.token_ids`.
        said: from `kept_generation`.
    """
    ends = ends_of(tokens["eos_token_id"], said)
    return {**tokens, "eos_token_id": ends if len(ends) > 1 else ends[0]}


def ends_of(end: int, said: dict[str, Any]) -> list[int]:
    """The ids after which a text is over.

    Arguments:
        end: the tokenizer's.
        said: from `kept_generation`.
    """
    given = said.get("eos_token_id", [])
    return list(dict.fromkeys([end, *(given if isinstance(given, list) else [given])]))
