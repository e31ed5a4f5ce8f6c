"""From a split's tokens to examples of a fixed length: inputs, targets, which targets count, and documents' borders.

Names carry shapes: B rows of a batch, T tokens of a sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.config import Run
from meshwright.data.packing import Plan, ensure_packed
from meshwright.data.store import Split, Store
from meshwright.errors import UserError


class TooShort(UserError):
    """A split holds no example."""


class Batch(NamedTuple):
    """Rows of a batch."""

    inputs_BT: np.ndarray
    """int32 ids."""
    targets_BT: np.ndarray
    """int32 ids: at each place the token after the input's."""
    weights_BT: np.ndarray
    """float32: 1 where the target counts in the loss, else 0."""
    segments_BT: np.ndarray | None = None
    """int32: which document of its row a place belongs to, counted from 1; 0: padding. None: the row is one."""
    positions_BT: np.ndarray | None = None
    """int32: the place within the document (of one cut into pieces, within the piece). None: within the row."""


class Examples(Protocol):
    """The examples of a split, numbered from 0."""

    padding: float
    """The share of places that hold no token."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        ...


class Stream:
    """Windows over the split's tokens, across documents: example i is tokens i·T to i·T + T + 1 (the end excluded).

    Windows overlap by the one token that is the last target of one and the first input of the next, so every token
    but the first is a target once; up to T tokens at the end of the split are left over.

    Arguments:
        split: the tokens.
        sequence_length: T.

    Raises:
        TooShort: the split hasn't T + 1 tokens.
    """

    padding = 0.0

    def __init__(self, split: Split, sequence_length: int) -> None:
        self._split = split
        self._length = sequence_length
        self._count = max(0, (split.token_count - 1) // sequence_length)
        if not self._count:
            raise _too_short(split, sequence_length)

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        tokens = np.empty((len(indices), self._length + 1), np.int32)
        weights = np.ones((len(indices), self._length), np.float32)
        for row, index in enumerate(indices.tolist()):
            start = index * self._length
            tokens[row] = self._split.read(start, self._length + 1)
            if self._split.is_weighted:
                weights[row] = self._split.read_weights(start + 1, self._length)
        return _batch(tokens, weights)


class Padded:
    """One document an example: cut after T + 1 tokens, or filled up with end of text, which has weight 0.

    The document's own end of text counts. Documents with nothing to learn are left out: those of fewer than 2 tokens,
    end of text included, and conversations with no answer in their first T + 1.

    Arguments:
        split: the tokens and where documents end.
        sequence_length: T.

    Raises:
        TooShort: the split has no document with anything to learn.
    """

    def __init__(self, split: Split, sequence_length: int) -> None:
        self._split = split
        self._length = sequence_length
        targets = np.diff(split.document_ends.astype(np.int64), prepend=0) - 1
        self._documents = np.flatnonzero(targets >= 1)
        if split.is_weighted:
            self._documents = self._documents[[self._teaches(document) for document in self._documents.tolist()]]
        self.left_out = split.document_count - len(self._documents)
        """Documents with nothing to learn."""
        if not len(self._documents):
            raise _no_document(split)
        self.padding = 1 - float(np.minimum(targets[self._documents], sequence_length).mean()) / sequence_length

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        tokens = np.full((len(indices), self._length + 1), self._split.end_of_text, np.int32)
        weights = np.zeros((len(indices), self._length), np.float32)
        for row, index in enumerate(indices):
            start, length = self._range(int(self._documents[index]))
            tokens[row, :length] = self._split.read(start, length)
            weights[row, : length - 1] = self._split.read_weights(start + 1, length - 1)
        return _batch(tokens, weights)

    def _range(self, document: int) -> tuple[int, int]:
        start, length = self._split.document_range(document)
        return start, min(length, self._length + 1)

    def _teaches(self, document: int) -> bool:
        start, length = self._range(document)
        return bool(self._split.read_weights(start + 1, length - 1).any())


class Packed:
    """Whole documents side by side, as a plan has them (see `meshwright.data.packing`); filled up with end of text.

    Arguments:
        split: the tokens.
        sequence_length: T.
        plan: which pieces lie in which sequence.
        document_mask: whether batches say where documents lie, so that attention can stay within them.

    Raises:
        TooShort: the split has no document of 2 tokens.
    """

    def __init__(self, split: Split, sequence_length: int, plan: Plan, document_mask: bool) -> None:
        self._split = split
        self._length = sequence_length
        self._plan = plan
        self._document_mask = document_mask
        self.padding = plan.padding
        if not len(plan.ends):
            raise _no_document(split)

    def __len__(self) -> int:
        return len(self._plan.ends)

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples `indices`, one a row."""
        shape = (len(indices), self._length)
        inputs = np.full(shape, self._split.end_of_text, np.int32)
        targets, weights = inputs.copy(), np.zeros(shape, np.float32)
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, index in enumerate(indices.tolist()):
            first = int(self._plan.ends[index - 1]) if index else 0
            pieces = slice(first, int(self._plan.ends[index]))
            starts, sizes = self._plan.starts[pieces].tolist(), self._plan.targets[pieces].tolist()
            begin = 0
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True), 1):
                here = slice(begin, begin + size)
                tokens = self._split.read(start, size + 1)
                inputs[row, here], targets[row, here] = tokens[:-1], tokens[1:]
                weights[row, here] = self._split.read_weights(start + 1, size)
                segments[row, here], positions[row, here] = number, np.arange(size)
                begin += size
        if self._document_mask:
            return Batch(inputs, targets, weights, segments, positions)
        return Batch(inputs, targets, weights)


def open_examples(store: Store, split_name: str, run: Run) -> Examples:
    """The examples of a split under `data.packing`.

    Arguments:
        store: an open store.
        split_name: `train` or `validation`.
        run: `data.packing`, `data.document_mask` and `train.sequence_length` are read.

    Raises:
        TooShort: the split holds none.
        UserError: the plan of `packed` can't be read, or the store holds pairs and the packing isn't theirs, or the
            other way round.
    """
    from meshwright.data.pairs import Pairs, check_pairs

    check_pairs(store, run)
    split, length = store.split(split_name), run.train.sequence_length
    if run.data.packing == "stream":
        return Stream(split, length)
    if run.data.packing == "padded":
        return Padded(split, length)
    if run.data.packing == "pairs":
        return Pairs(split, length)
    return Packed(split, length, ensure_packed(store, split_name, length), run.data.document_mask)


def gather(examples: Sequence[Examples], sources: np.ndarray, indices: np.ndarray) -> Batch:
    """Rows from several sources.

    Arguments:
        examples: of each source.
        sources, indices: of each row, which source it is from and which example there, int64 `[B]`.
    """
    there = np.unique(sources)
    if len(there) <= 1:
        return examples[int(there[0]) if len(there) else 0].batch(indices)
    by_source = np.argsort(sources, kind="stable")
    back = np.argsort(by_source, kind="stable")
    parts = zip(*(examples[source].batch(indices[sources == source]) for source in there), strict=True)
    return Batch._make(None if part[0] is None else np.concatenate(part)[back] for part in parts)


def _too_short(split: Split, sequence_length: int) -> TooShort:
    more = "give data.train more text" if split.name == "train" else "raise data.validation"
    return TooShort(
        f"train.sequence_length = {sequence_length}: longer than the store's {split.name} split "
        f"({split.token_count:,} tokens, and one example needs {sequence_length + 1:,}); shorten it, or {more}"
    )


def _no_document(split: Split) -> TooShort:
    return TooShort(
        f"data.{split.name}: the store's {split.name} split has no document with anything to learn, at least 2 tokens "
        f"({split.document_count:,} documents); give it more text, or raise train.sequence_length"
    )


def _batch(tokens: np.ndarray, weights: np.ndarray) -> Batch:
    return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), weights)
