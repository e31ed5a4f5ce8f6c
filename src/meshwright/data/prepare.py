"""From a run's text to its token store: opened where it is there already, else made."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import Run, TokenizerSection
from meshwright.data.encode import LeftOut, Progress, bpe_texts, encode, sided
from meshwright.data.sources import Source, open_source
from meshwright.data.store import SPLITS, Store, open_nanogpt
from meshwright.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from meshwright.data.writer import SplitWriter, Taken, beside, write_manifest
from meshwright.errors import UserError


def prepare(run: Run, *, source: Source | None = None, on_progress: Progress | None = None) -> Store:
    """The token store of a run.

    `data.train` may be a store or a nanoGPT `.bin`, opened where it lies. Otherwise the store is at `data.store`, or at
    `stores/<key>` where the key covers what it is made from: the source's listing, `data.validation`, `data.separator`
    and the tokenizer. A store that is there is opened; one that isn't is made beside and renamed into place when whole.

    Arguments:
        run: the run.
        source: documents from Python, in place of `data.train`.
        on_progress: called as `Progress` says.

    Returns:
        The open store.

    Raises:
        UserError: no text, no such file, a tokenizer that can't be had, a split without documents, or a store at the
            run's place that was made from something else.
    """
    if source is None:
        if run.data.train.endswith(".bin"):
            return _open_nanogpt(run)
        if (Path(run.data.train) / "manifest.json").is_file():
            return _open_ready(run)
        source = open_source(run.data.train, run.data.separator)
    validation: Source | float
    if isinstance(run.data.validation, str):
        validation = open_source(run.data.validation, run.data.separator, "data.validation")
    else:
        validation = float(run.data.validation)
    tokenizer = None if run.tokenizer.kind == "bpe" else open_tokenizer(run.tokenizer.kind)

    made_from = _made_from(run, source, validation, tokenizer)
    path = Path(run.data.store or f"stores/{_key(made_from)}")
    if not _is_free(path):
        return _open_own(path, made_from)
    try:
        with beside(path) as folder:
            _make(run, folder, source, validation, tokenizer, made_from, on_progress or _silent)
    except Taken:
        return _open_own(path, made_from)  # another process of the same run was first
    return Store.open(path)


def _make(
    run: Run,
    folder: Path,
    source: Source,
    validation: Source | float,
    tokenizer: Tokenizer | None,
    made_from: dict[str, Any],
    progress: Progress,
) -> None:
    total = made_from["source"].get("bytes")
    if tokenizer is None:
        texts = bpe_texts(sided(source, validation, LeftOut()), total, progress)
        tokenizer = train_bpe(texts, run.tokenizer.vocab_size)
    if total is not None and isinstance(made_from["validation"], dict):
        total += made_from["validation"].get("bytes", 0)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    writers = {name: SplitWriter(folder, name, dtype) for name in SPLITS}
    left_out = LeftOut()
    encode(sided(source, validation, left_out), tokenizer, writers, total, progress)
    splits = {name: writer.finish() for name, writer in writers.items()}
    _check_documents(run, splits, left_out)
    about = {"made_from": made_from, "left_out": {"documents": left_out.count, "examples": left_out.examples}}
    write_manifest(folder, splits, tokenizer, dtype, about)


def _check_documents(run: Run, splits: dict[str, dict[str, Any]], left_out: LeftOut) -> None:
    train, held_out = (splits[name]["documents"] for name in SPLITS)
    share = run.data.validation
    if not train:
        why = ""
        if left_out.count:
            why = f" ({left_out.count} left out, the first {left_out.examples[0]})"
        elif held_out:
            why = f" (data.validation = {share} holds out all {held_out})"
        raise UserError(f"data.train = {run.data.train!r}: gives no training documents{why}; give it more text")
    if share and not held_out:
        raise UserError(
            f"data.validation = {share!r}: holds out none of the {train:,} documents; set data.separator if a file "
            "holds several, raise the share, give a file of its own, or set it to 0"
        )


def _made_from(run: Run, source: Source, validation: Source | float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        section = {"kind": "bpe", "vocab_size": run.tokenizer.vocab_size}
    else:
        section = {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint}
    return {
        "source": source.describe(),
        "validation": validation if isinstance(validation, float) else validation.describe(),
        "separator": run.data.separator,
        "tokenizer": section,
    }


def _identity(made_from: dict[str, Any]) -> dict[str, Any]:
    # What must be equal, and no more: a source may be called by another name, a tokenizer lie in another folder.
    def fingerprint(part: Any) -> Any:
        return part.get("fingerprint", part) if isinstance(part, dict) else part

    return {name: fingerprint(part) for name, part in made_from.items()}


def _key(made_from: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_identity(made_from), sort_keys=True).encode()).hexdigest()[:16]


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _open_own(path: Path, made_from: dict[str, Any]) -> Store:
    store = Store.open(path)
    found = store.manifest["made_from"]
    there, here = _identity(found), _identity(made_from)
    differences = [
        f"{name} {_show(found.get(name))} there, {_show(made_from[name])} here"
        for name in here
        if there.get(name) != here[name]
    ]
    if differences:
        raise UserError(
            f"data.store: the store at {path} was made from something else ({'; '.join(differences)}); name another "
            "folder, or remove that one to have it made anew"
        )
    return store


def _show(part: Any) -> str:
    if not isinstance(part, dict):
        return repr(part)
    if "kind" in part:
        return f"{part['kind']} of {part['vocab_size']}" if "vocab_size" in part else part["kind"]
    return f"{part.get('name')!r} (fingerprint {str(part.get('fingerprint'))[:8]})"


def _open_ready(run: Run) -> Store:
    store = Store.open(run.data.train)
    found, asked = store.manifest["tokenizer"], run.tokenizer
    if asked.kind == "bpe":
        size = store.manifest["made_from"]["tokenizer"].get("vocab_size", found["vocab_size"])
        same = found["kind"] == "bpe" and size == asked.vocab_size
        here = f"bpe of {asked.vocab_size}"
    else:
        size = found["vocab_size"]
        tokenizer = open_tokenizer(asked.kind)
        same = tokenizer.fingerprint == found["fingerprint"]
        here = f"{asked.kind} (fingerprint {tokenizer.fingerprint[:8]})"
    if not same:
        mend = f'kind = "{found["kind"]}"' + (f", vocab_size = {size}" if found["kind"] == "bpe" else "")
        raise UserError(
            f"tokenizer.kind = {asked.kind!r}: the store {run.data.train} was made with {found['kind']} of {size} "
            f"(fingerprint {found['fingerprint'][:8]}), not {here}; write {mend} under [tokenizer], or name "
            "another store"
        )
    return store


def _open_nanogpt(run: Run) -> Store:
    if not isinstance(run.data.validation, str):
        raise UserError(
            f"data.validation = {run.data.validation}: beside a .bin as data.train it must be a path; give val.bin's"
        )
    kind = run.tokenizer.kind
    if run.tokenizer == TokenizerSection():
        kind = "tiktoken:gpt2"  # what nanoGPT writes
    if kind == "bpe":
        raise UserError(
            "tokenizer.kind = 'bpe': a .bin is encoded already; name the tokenizer that wrote it, such as tiktoken:gpt2"
        )
    return open_nanogpt(run.data.train, run.data.validation, open_tokenizer(kind))


def _silent(stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int) -> None:
    pass
