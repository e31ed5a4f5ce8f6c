"""From a split's tokens to examples of a fixed length: inputs, targets and which targets count.

Names carry shapes: B rows of a batch, T tokens of a sequence.
"""

from typing import NamedTuple

import numpy as np

from meshwright.data.store import Split
from meshwright.errors import UserError


class Batch(NamedTuple):
    """Rows of a batch."""

    inputs_BT: np.ndarray
    """int32 ids."""
    targets_BT: np.ndarray
    """int32 ids: at each place the token after the input's."""
    weights_BT: np.ndarray
    """float32: 1 where the target counts in the loss, else 0."""


class Stream:
    """Windows over the split's tokens, across documents: example i is tokens i·T to i·T + T + 1 (the end excluded).

    Windows overlap by the one token that is the last target of one and the first input of the next, so every token
    but the first is a target once; up to T tokens at the end of the split are left over.

    Arguments:
        split: the tokens.
        sequence_length: T.

    Raises:
        UserError: the split hasn't T + 1 tokens.
    """

    def __init__(self, split: Split, sequence_length: int) -> None:
        self._split = split
        self._length = sequence_length
        self._count = max(0, (split.token_count - 1) // sequence_length)
        if not self._count:
            raise _too_short(split, sequence_length)

    def __len__(self) -> int:
        return self._count

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs int32, targets int32 and weights float32 of example `index`, each `[T]`."""
        return _row(self.batch(np.array([index])))

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        tokens = np.empty((len(indices), self._length + 1), np.int32)
        for row, index in enumerate(indices):
            tokens[row] = self._split.read(int(index) * self._length, self._length + 1)
        return _batch(tokens, np.ones((len(indices), self._length), np.float32))


class Padded:
    """One document an example: cut after T + 1 tokens, or filled up with end of text, which has weight 0.

    The document's own end of text counts. Documents of fewer than 2 tokens, end of text included, hold nothing to
    learn and are left out.

    Arguments:
        split: the tokens and where documents end.
        sequence_length: T.

    Raises:
        UserError: the split has no document of 2 tokens.
    """

    def __init__(self, split: Split, sequence_length: int) -> None:
        self._split = split
        self._length = sequence_length
        lengths = np.diff(split.document_ends.astype(np.int64), prepend=0)
        self._documents = np.flatnonzero(lengths >= 2)
        self.left_out = split.document_count - len(self._documents)
        """Documents of fewer than 2 tokens."""
        if not len(self._documents):
            raise UserError(
                f"data.{split.name}: the store's {split.name} split has no document of 2 tokens or more "
                f"({split.document_count:,} documents); give it more text"
            )

    def __len__(self) -> int:
        return len(self._documents)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs int32, targets int32 and weights float32 of example `index`, each `[T]`."""
        return _row(self.batch(np.array([index])))

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        tokens = np.full((len(indices), self._length + 1), self._split.end_of_text, np.int32)
        weights = np.zeros((len(indices), self._length), np.float32)
        for row, index in enumerate(indices):
            start, length = self._split.document_range(int(self._documents[index]))
            length = min(length, self._length + 1)
            tokens[row, :length] = self._split.read(start, length)
            weights[row, : length - 1] = 1
        return _batch(tokens, weights)


def open_examples(split: Split, packing: str, sequence_length: int) -> Stream | Padded:
    """The examples of a split under `data.packing`.

    Raises:
        UserError: the split is too short to hold one.
    """
    return Stream(split, sequence_length) if packing == "stream" else Padded(split, sequence_length)


def _too_short(split: Split, sequence_length: int) -> UserError:
    more = "give data.train more text" if split.name == "train" else "raise data.validation"
    return UserError(
        f"train.sequence_length = {sequence_length}: longer than the store's {split.name} split "
        f"({split.token_count:,} tokens, and one example needs {sequence_length + 1:,}); shorten it, or {more}"
    )


def _batch(tokens: np.ndarray, weights: np.ndarray) -> Batch:
    return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), weights)


def _row(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return batch.inputs_BT[0], batch.targets_BT[0], batch.weights_BT[0]
