"""Pairs of answers as examples: the chosen and the rejected text of a pair side by side in one row."""

import numpy as np

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.examples import Batch, TooShort
from meshwright.data.store import LEARNED, REJECTED, SPLITS, Split, Store
from meshwright.errors import UserError

CHOSEN_SEGMENT, REJECTED_SEGMENT = 1, 2

# Pairs whose weights are read at a time.
_WINDOW = 1 << 12


class Pairs:
    """One pair an example: the chosen text in segment 1, the rejected one in segment 2, then end of text as padding.

    Positions start from 0 in each, and what the last turn of each says counts, its end of text included. A pair that
    isn't whole within T places, or of which a text has nothing that counts, is left out.

    Arguments:
        split: of a store of pairs.
        sequence_length: T.

    Raises:
        TooShort: no pair is left.
    """

    def __init__(self, split: Split, sequence_length: int) -> None:
        self._split = split
        self._length = sequence_length
        self._chosen, targets, teaches = _measured(split)
        self._documents = np.flatnonzero(teaches & (targets <= sequence_length))
        self.left_out = split.document_count - len(self._documents)
        """Pairs that don't fit, or with nothing to learn."""
        if not len(self._documents):
            shortest = f", the shortest of {targets[teaches].min():,} places" if teaches.any() else ""
            raise TooShort(
                f"train.sequence_length = {sequence_length}: none of the {split.document_count:,} pairs in the store's "
                f"{split.name} split fits a row{shortest}; raise it, or give data.{split.name} more"
            )
        self.padding = 1 - float(targets[self._documents].mean()) / sequence_length

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        shape = (len(indices), self._length)
        inputs = np.full(shape, self._split.end_of_text, np.int32)
        targets, weights = inputs.copy(), np.zeros(shape, np.float32)
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, document in enumerate(self._documents[indices].tolist()):
            start, length = self._split.document_range(document)
            border, begin = int(self._chosen[document]), 0
            for segment, here in ((CHOSEN_SEGMENT, (0, border)), (REJECTED_SEGMENT, (border, length))):
                first, size = start + here[0], here[1] - here[0] - 1
                places = slice(begin, begin + size)
                tokens = self._split.read(first, size + 1)
                inputs[row, places], targets[row, places] = tokens[:-1], tokens[1:]
                weights[row, places] = self._split.read_weights(first + 1, size).astype(np.uint8) & LEARNED
                segments[row, places], positions[row, places] = segment, np.arange(size)
                begin += size
        return Batch(inputs, targets, weights, segments, positions)


def check_pairs(store: Store, run: Run) -> None:
    """Refuse a store of pairs under a packing that isn't theirs, and another store under the one that is.

    Arguments:
        store: an open store.
        run: `data.packing` is read.

    Raises:
        UserError: they don't fit.
    """
    packing = run.data.packing
    if store.has_pairs and packing != "pairs":
        raise UserError(
            f'data.packing = "{packing}": the store {store.path} holds pairs of answers; set it to "pairs", or name '
            "another store"
        )
    if packing == "pairs" and not store.has_pairs:
        raise UserError(
            f'data.packing = "pairs": the store {store.path} holds no pairs of answers; name the text that it was made '
            "from, or set another packing"
        )


def pairs_left_out(corpus: Corpus, run: Run) -> str:
    """What to say of pairs that no row has; empty: all have one, or there are no pairs."""
    if run.data.packing != "pairs":
        return ""
    found, length = [], run.train.sequence_length
    for name in SPLITS:
        splits = [store.split(name) for store in corpus.stores]
        fitting = sum(int((teaches & (targets <= length)).sum()) for _, targets, teaches in map(_measured, splits))
        if left_out := sum(split.document_count for split in splits) - fitting:
            found.append(f"{left_out:,} of {left_out + fitting:,} for {'training' if name == 'train' else name}")
    why = f"longer than train.sequence_length = {length}, or with nothing to learn"
    return f"pairs left out, {why}: {', '.join(found)}" if found else ""


def _measured(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair: tokens of the chosen text with its end of text, targets of both, and whether both have some that
    count."""
    ends = split.document_ends.astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    chosen, teaches = np.zeros(len(ends), np.int64), np.zeros(len(ends), bool)
    for first in range(0, len(ends), _WINDOW):
        here = slice(first, first + _WINDOW)
        starts = ends[here] - lengths[here]
        bits = split.read_weights(int(starts[0]), int(ends[here][-1] - starts[0])).astype(np.uint8)
        starts = starts - starts[0]
        is_chosen = (bits & REJECTED) == 0
        chosen[here] = np.add.reduceat(is_chosen, starts, dtype=np.int64)
        counts = (bits & LEARNED) > 0
        counts[starts] = False  # the first token of a text is no target
        seconds = starts + chosen[here]
        counts[seconds[seconds < len(counts)]] = False
        both = [np.add.reduceat(counts & half, starts, dtype=np.int64) for half in (is_chosen, ~is_chosen)]
        teaches[here] = (both[0] > 0) & (both[1] > 0)
    return chosen, lengths - 2, teaches
