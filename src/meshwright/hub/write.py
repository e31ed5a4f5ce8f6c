"""Exports the model of a run: writes it beside, proves it, and only then gives the folder its name."""

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import Run
from meshwright.data.tokenizer import Tokenizer
from meshwright.engines.base import Engine
from meshwright.errors import UserError
from meshwright.files import sync
from meshwright.hub.card import model_card
from meshwright.hub.export import TYPES, write_model
from meshwright.hub.proof import Proof, compare_tensors, prove
from meshwright.hub.reader import Checkpoint
from meshwright.hub.tokenizer_files import HARD_TEXTS, token_ids, write_tokenizer
from meshwright.models.hf import weights

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Trained:
    """What is exported."""

    run: Run
    """As resolved; its vocabulary is the model's."""
    engine: Engine
    """With the checkpoint's parameters."""
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    """Of the checkpoint."""
    losses: dict[str, float]
    """See `meshwright.hub.card.model_card`."""


@dataclass(frozen=True)
class Export:
    """An export that was proven."""

    path: Path
    files: list[str]
    bytes: int
    proof: list[str]
    """What was compared, in lines."""


def export(
    out: Path, trained: Trained, tokens_BT: np.ndarray, *, dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> Export:
    """Write a checkpoint for Hugging Face's libraries, and prove that it is the run's model.

    Arguments:
        out: the folder to make; it may be there if it is empty.
        trained: the model and what belongs to it.
        tokens_BT: real token ids, on which logits are compared.
        dtype: of the tensors: `float32` or `bfloat16`.
        shard_bytes: the most bytes of tensors in one file.

    Raises:
        UserError: the folder isn't empty, the model has no such form, or the proof failed: what was written is then in
            `<out>.failed`, with the reason.
    """
    if dtype not in TYPES:
        raise UserError(f"dtype = {dtype!r}: must be one of {', '.join(TYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; nothing is overwritten: name a folder that isn't there, or is empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    folder.mkdir()
    try:
        spec, parameters = trained.run.model.spec, trained.engine.on_host()
        write_tokenizer(folder, trained.tokenizer, spec.context_length)
        ids = token_ids(trained.tokenizer)
        write_model(folder, spec, parameters, dtype=dtype, shard_bytes=shard_bytes, tokens=ids)
        proof, failure = _proven(folder, trained, tokens_BT, dtype)
        text = model_card(
            trained.run,
            parameters=trained.engine.parameters,
            active_parameters=trained.engine.active_parameters,
            dtype=dtype,
            manifest=trained.manifest,
            losses=trained.losses,
            proof=proof,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
        if failure:
            raise _failed(folder, out, failure)
        for path in folder.iterdir():
            sync(path)
        sync(folder)
        folder.rename(out)
    finally:
        if folder.exists():
            shutil.rmtree(folder)
    sync(out.parent)
    files = sorted(path.name for path in out.iterdir())
    return Export(out, files, sum((out / name).stat().st_size for name in files), proof)


def _proven(folder: Path, trained: Trained, tokens_BT: np.ndarray, dtype: str) -> tuple[list[str], str]:
    """What was compared, in lines; and why the export isn't the run's model, empty where it is."""
    engine = trained.engine
    try:
        checkpoint = Checkpoint(folder)
        count = compare_tensors(checkpoint, engine.on_host(), weights(trained.run.model.spec), dtype)
        proof: Proof = prove(
            folder,
            tokens_BT,
            run_logits=engine.logits,
            rounded_logits=None if dtype == "float32" else lambda tokens: engine.logits(tokens, dtype),
            reread_logits=lambda tokens: engine.logits_of(checkpoint, tokens),
        )
    except UserError as error:
        return [], str(error)
    lines = [
        f"{count} tensors read again from disk: as they were written",
        f"tokenizer opened again: the same ids of {len(HARD_TEXTS)} texts",
        *proof.lines(),
    ]
    return lines, proof.failure


def _failed(folder: Path, out: Path, failure: str) -> UserError:
    (folder / "FAILED.txt").write_text(f"This is not the run's model: {failure}\n", encoding="utf-8")
    place, taken = out.with_name(f"{out.name}.failed"), 1
    while place.exists():
        taken += 1
        place = out.with_name(f"{out.name}.failed-{taken}")
    folder.rename(place)
    return UserError(f"{out}: not exported, since what was written is not the run's model: {failure}; it is in {place}")
