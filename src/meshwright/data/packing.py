"""Whole documents side by side in sequences, planned once so that any sequence can be read by itself.

A document of n + 1 tokens has n targets. It is cut into pieces of at most T targets; a piece of n targets is n + 1
tokens and takes n places of a sequence. Pieces of a document overlap by the one token that is the last target of one
and the first input of the next, so every token of a document but its first is a target once.

Pieces go into sequences of T places by best fit, longest first, window by window of the store: each goes where it
leaves the least room. A plan is flat arrays:

packed_<T>/<split>/plan.json    what it was made from, and the share of padding; without it, a folder is no plan
                   starts.bin   uint64: each piece's first token in the split, sequence after sequence
                   targets.bin  uint32: its targets
                   ends.bin     uint64: the position just past each sequence's pieces
"""

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.store import SPLITS, Split, Store
from meshwright.errors import UserError
from meshwright.files import sync

FORMAT_VERSION = 1
# Pieces that are packed with one another: enough to find a good place for nearly all, few enough to hold.
WINDOW = 1 << 17

_MANIFEST = "plan.json"
_ARRAYS: dict[str, np.dtype] = {"starts": np.dtype("<u8"), "targets": np.dtype("<u4"), "ends": np.dtype("<u8")}


class Plan(NamedTuple):
    """Which pieces lie in which sequence."""

    starts: np.ndarray
    """uint64 `[pieces]`: the first token of each piece in the split, sequence after sequence."""
    targets: np.ndarray
    """uint32 `[pieces]`: how many targets it has; it is one token longer."""
    ends: np.ndarray
    """uint64 `[sequences]`: the position just past each sequence's pieces."""
    padding: float
    """The share of places that hold nothing."""


def prepare_packing(corpus: Corpus, run: Run) -> None:
    """Make the plans that a run will read, where `data.packing` asks for any.

    Arguments:
        corpus: of the run.
        run: `data.packing` and `train.sequence_length` are read.

    Raises:
        UserError: a plan that is there can't be read.
    """
    if run.data.packing == "packed":
        for store in corpus.stores:
            for name in SPLITS:
                ensure_packed(store, name, run.train.sequence_length)


def ensure_packed(store: Store, split_name: str, sequence_length: int) -> Plan:
    """The plan of a split, made in the store's folder if it isn't there.

    Arguments:
        store: an open store; where its folder can't be written to, or is none, the plan is made in memory.
        split_name: `train` or `validation`.
        sequence_length: T.

    Raises:
        UserError: the plan that is there was made from another store, or isn't whole.
    """
    split = store.split(split_name)
    folder = store.path / f"packed_{sequence_length}" / split_name
    if store.path.is_dir() and _made(folder, store, split, sequence_length):
        return _open(folder, store)
    plans = _in_memory.setdefault(store, {})
    if (split_name, sequence_length) not in plans:
        plans[split_name, sequence_length] = _planned(split, sequence_length)
    return plans[split_name, sequence_length]


_in_memory: WeakKeyDictionary[Store, dict[tuple[str, int], Plan]] = WeakKeyDictionary()


def _planned(split: Split, sequence_length: int) -> Plan:
    nothing = (np.empty(0, np.int64),) * 3
    windows = zip(nothing, *_windows(split, sequence_length), strict=True)
    starts, targets, sizes = (np.concatenate(column) for column in windows)
    return Plan(starts, targets, np.cumsum(sizes), _padding(len(sizes), int(targets.sum()), sequence_length))


def _made(folder: Path, store: Store, split: Split, sequence_length: int) -> bool:
    """Whether the plan is there, made now if it has to be; false: it can't be written there."""
    try:
        if (folder / _MANIFEST).is_file():
            return True
        folder.parent.mkdir(exist_ok=True)
        with ExitStack() as closing:
            lock = closing.enter_context(open(folder.parent / ".lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / _MANIFEST).is_file():
                return True  # another process was first
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            closing.callback(shutil.rmtree, partial, ignore_errors=True)
            _write(partial, store, split, sequence_length)
            partial.rename(folder)
            sync(folder.parent)
    except OSError:
        return False
    return True


def _write(folder: Path, store: Store, split: Split, sequence_length: int) -> None:
    pieces = sequences = targets_in_all = 0
    with ExitStack() as closing:
        files = {name: closing.enter_context((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}
        for starts, targets, sizes in _windows(split, sequence_length):
            columns = {"starts": starts, "targets": targets, "ends": pieces + np.cumsum(sizes)}
            for name, column in columns.items():
                files[name].write(column.astype(_ARRAYS[name]).data)
            pieces += len(starts)
            sequences += len(sizes)
            targets_in_all += int(targets.sum())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    manifest = {
        "format": FORMAT_VERSION,
        "store": store.fingerprint,
        "sequence_length": sequence_length,
        "pieces": pieces,
        "sequences": sequences,
        "padding": _padding(sequences, targets_in_all, sequence_length),
    }
    path = folder / _MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync(path)
    sync(folder)


def _open(folder: Path, store: Store) -> Plan:
    remove = f"remove {folder.parent} to have it made anew"
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION or manifest["store"] != store.fingerprint:
            raise UserError(f"{folder}: the plan of another store, or of another version of Meshwright; {remove}")
        counts = {"starts": manifest["pieces"], "targets": manifest["pieces"], "ends": manifest["sequences"]}
        arrays = {name: _map(folder / f"{name}.bin", dtype, counts[name]) for name, dtype in _ARRAYS.items()}
        return Plan(**arrays, padding=manifest["padding"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: can't be read ({error}); {remove}") from None


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has another size than its manifest says")
    return np.memmap(path, dtype, "r").view(np.ndarray) if count else np.empty(0, dtype)


def _padding(sequences: int, targets: int, sequence_length: int) -> float:
    return 1 - targets / max(sequences * sequence_length, 1)


def _windows(split: Split, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By window: each piece's start and targets, sequence after sequence, and how many pieces each sequence has."""
    for starts, targets in _pieces(split, sequence_length):
        places, sequences = best_fit(targets, sequence_length)
        in_order = np.argsort(places, kind="stable")
        yield starts[in_order], targets[in_order], np.bincount(places, minlength=sequences)


def _pieces(split: Split, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All pieces in the store's order, by window: the first token and the targets of each, int64."""
    for first in range(0, split.document_count, WINDOW):
        ends = split.document_ends[first : first + WINDOW].astype(np.int64)
        begins = np.concatenate([[int(split.document_ends[first - 1]) if first else 0], ends[:-1]])
        targets = np.maximum(ends - begins - 1, 0)
        last_piece = np.cumsum(-(-targets // sequence_length))
        pieces = int(last_piece[-1])
        borders = np.linspace(0, pieces, -(-pieces // WINDOW) + 1).astype(np.int64)
        for start, stop in itertools.pairwise(borders):
            piece = np.arange(start, stop)
            document = np.searchsorted(last_piece, piece, side="right")
            before = piece - np.where(document > 0, last_piece[document - 1], 0)
            done = before * sequence_length
            yield begins[document] + done, np.minimum(targets[document] - done, sequence_length)


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing: the longest first, each goes into the bin that it leaves the least room in.

    Arguments:
        lengths: of the pieces, int64 `[n]`, each from 1 to `room`.
        room: of a bin.

    Returns:
        The bin of each piece, int64 `[n]`, and how many bins there are. Among equals, which goes where is fixed.
    """
    bins_of_left: list[list[int]] = [[] for _ in range(room)]  # by the room that is left in them
    there = 0  # bit r is set where a bin with r left is
    chosen: list[int] = []  # the bins of the pieces, longest piece first
    opened = 0
    counts = np.bincount(lengths, minlength=room + 1)
    for length in np.flatnonzero(counts)[::-1].tolist():
        todo = int(counts[length])
        while todo:
            if fitting := there >> length:
                left = length + (fitting & -fitting).bit_length() - 1
                bins = bins_of_left[left]
            else:
                left, new = room, -(-todo // (room // length))
                bins = list(range(opened, opened + new))
                opened += new
            # What a bin has left after one of them is the least that fits the next, as long as it fits.
            each = left // length
            whole = min(len(bins), todo // each)
            after = [(bins[:whole], each)]
            if whole < len(bins) and (rest := todo - whole * each):
                after.append(([bins[whole]], rest))
            taken = sum(len(some) for some, _ in after)
            del bins[:taken]
            if left < room and not bins:
                there &= ~(1 << left)
            for some, many in after:
                chosen += some * many
                todo -= len(some) * many
                if some and (still := left - many * length):
                    bins_of_left[still] += some
                    there |= 1 << still
    places = np.empty(len(lengths), np.int64)
    places[np.argsort(-lengths, kind="stable")] = chosen
    return places, opened
