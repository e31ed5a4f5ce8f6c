"""Exports the model of a run: writes it beside, proves it, and only then gives the folder its name."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import Run
from meshwright.data.tokenizer import Tokenizer
from meshwright.engines.base import Engine
from meshwright.errors import UserError
from meshwright.files import sync
from meshwright.hub.adapter import Base, about, base_name, prove_adapter, write_adapter
from meshwright.hub.card import model_card
from meshwright.hub.export import TYPES, Parameters, write_model
from meshwright.hub.generation import with_ends
from meshwright.hub.proof import Proof, compare_tensors, prove
from meshwright.hub.reader import Checkpoint, open_checkpoint
from meshwright.hub.reference import peft_version
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
    generation: dict[str, Any]
    """See `meshwright.hub.generation.kept_generation`."""
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

    def write(folder: Path) -> tuple[list[str], str]:
        spec, parameters = trained.run.model.spec, trained.engine.on_host()
        write_tokenizer(folder, trained.tokenizer, spec.context_length)
        said = trained.generation
        tokens = with_ends(token_ids(trained.tokenizer), said)
        write_model(folder, spec, parameters, dtype=dtype, shard_bytes=shard_bytes, tokens=tokens, generation=said)
        proof, failure = _proven(folder, trained, tokens_BT, dtype)
        _write_card(folder, trained, dtype, proof)
        return proof, failure

    return _made(out, write)


def export_adapter(out: Path, trained: Trained, tokens_BT: np.ndarray) -> Export:
    """Write the adapters of a run for the library `peft`, and prove that with their base they are the run's model.

    Arguments:
        out, trained, tokens_BT: as in `export`.

    Raises:
        UserError: the run has no adapters, their base is a run, the folder isn't empty, or the proof failed.
    """
    run, engine = trained.run, trained.engine
    if not run.lora.rank:
        raise UserError("adapter: the run has none (lora.rank = 0); export the whole model")
    name, parameters = base_name(trained.manifest["base"]), engine.adapters_on_host()

    def write(folder: Path) -> tuple[list[str], str]:
        write_adapter(folder, run.model.spec, run.lora, parameters, name)
        write_tokenizer(folder, trained.tokenizer, run.model.context_length)
        try:
            with _base_of(trained, parameters, folder.parent) as base:
                proof = prove_adapter(
                    folder,
                    run.model.spec,
                    run.lora,
                    parameters,
                    base=base,
                    tokens_BT=tokens_BT,
                    run_logits=engine.logits,
                )
        except UserError as error:
            lines, failure = [], str(error)
        else:
            lines, failure = [_TENSORS_OF_ADAPTERS, *proof.lines()], proof.failure
        _write_card(folder, trained, "float32", lines, adapters_of=name)
        return lines, failure

    return _made(out, write)


@contextmanager
def _base_of(trained: Trained, parameters: Parameters, beside: Path) -> Iterator[Path]:
    """The folder of what adapters were trained beside; of maps in 4 bits what these stand for, written for so long."""
    if trained.run.lora.quantize == "none" or not peft_version():
        yield open_checkpoint(trained.manifest["base"]).folder
        return
    with tempfile.TemporaryDirectory(dir=beside, prefix=".base.") as folder:
        more: dict[str, Any] = {"dtype": "float32", "shard_bytes": SHARD_BYTES, "tokens": {}}
        write_model(Path(folder), trained.run.model.spec, Base(parameters), **more)
        yield Path(folder)


_TENSORS_OF_ADAPTERS = "tensors read again from disk: each pair makes what the run's adapter adds"


def _made(out: Path, write: Callable[[Path], tuple[list[str], str]]) -> Export:
    """A folder that is written beside, and gets its name when it is proven.

    Arguments:
        out: the folder to make.
        write: given an empty folder, writes all that is to be in it; gives what was compared, in lines, and why it
            isn't the run's model, empty where it is.
    """
    given, out = out, out.resolve()  # `.`, and what a link leads to
    if os.path.ismount(out):
        raise UserError(f"{out}: is where a file system is mounted; name a folder in it that isn't there yet")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; nothing is overwritten: name a folder that isn't there, or is empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    folder.mkdir()
    try:
        proof, failure = write(folder)
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
    return Export(given, files, sum((out / name).stat().st_size for name in files), proof)


def _write_card(folder: Path, trained: Trained, dtype: str, proof: list[str], adapters_of: str = "") -> None:
    run, engine = trained.run, trained.engine
    rows = about(run.lora, run.model.spec, engine.trained_parameters) if run.lora.rank else {}
    text = model_card(
        run,
        parameters=engine.parameters,
        active_parameters=engine.active_parameters,
        dtype=dtype,
        manifest=trained.manifest,
        losses=trained.losses,
        proof=proof,
        adapters=rows,
        adapters_of=adapters_of,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


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
