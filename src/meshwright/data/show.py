"""The first examples of a run as the model will see them, token by token as text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.examples import Batch, Examples, open_examples
from meshwright.data.order import Order, Shuffle
from meshwright.data.store import Store
from meshwright.data.tokenizer import StreamDecoder, Tokenizer
from meshwright.errors import UserError


class Piece(NamedTuple):
    """Text of tokens that are alike."""

    text: str
    learned: bool
    """Whether they count in the loss. The first token that a document, or a window, shows never does."""
    special: bool = False
    """Whether it is one token that stands for no text, and `text` its name."""


class Part(NamedTuple):
    """What an example has of one document."""

    pieces: list[Piece]
    positions: range
    """Those of its tokens that the model reads; it reads all but the last of an example, or of a packed document."""
    ends: bool
    """Whether the document ends here, with end of text."""


class Example(NamedTuple):
    """One row of a batch."""

    step: int
    """The step that reads it, or the batch of an evaluation, from 1."""
    row: int
    """From 1."""
    source: str
    """The name of its source."""
    parts: list[Part]
    learned: int
    """How many tokens count in the loss."""
    padding: int
    """Places that hold no token."""


class Origin(NamedTuple):
    """A source, and what its split holds."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class View:
    """Examples, and where they come from."""

    run: str
    split: str
    sources: list[Origin]
    packing: str
    document_mask: bool
    """Whether attention stays within a document."""
    sequence_length: int
    padding: float
    """The share of places that hold no token, in an epoch of each source."""
    end_of_text: str
    """The name of the token after each document."""
    examples: list[Example]


def look(corpus: Corpus, run: Run, count: int, split: str = "train") -> View:
    """Decode the first examples of a run.

    Arguments:
        corpus: the prepared data.
        run: the run.
        count: how many, at most.
        split: `train`, from the first step on, or `validation`, as an evaluation reads them.

    Raises:
        UserError: the split is too short for one example, or nothing is held out.
    """
    opened = _opened(corpus, run, split)
    examples = [one for one, _, _ in opened]
    many = np.array([len(one) for one in examples])
    rows = _train_rows(corpus, run, many) if split == "train" else _validation_rows(run, many)
    decoding = _Decoding(corpus.tokenizer(), run.data.packing)
    shown = []
    for (step, row, source, index), _ in zip(rows, range(count), strict=False):
        batch = examples[source].batch(np.array([index]))
        shown.append(decoding.example(step, row, opened[source][1], batch))
    held = 1 - np.array([one.padding for one in examples])
    names = [run.data.train] if isinstance(run.data.train, str) else [name for _, name, _ in opened]
    splits = [store.split(split) for _, _, store in opened]
    return View(
        run=run.name,
        split=split,
        sources=[Origin(name, one.token_count, one.document_count) for name, one in zip(names, splits, strict=True)],
        packing=run.data.packing,
        document_mask=run.data.packing == "pairs" or (run.data.packing == "packed" and run.data.document_mask),
        sequence_length=run.train.sequence_length,
        padding=1 - float(held @ many / many.sum()),
        end_of_text=decoding.name(decoding.end_of_text),
        examples=shown,
    )


def _opened(corpus: Corpus, run: Run, split: str) -> list[tuple[Examples, str, Store]]:
    if split == "validation" and not corpus.validation:
        raise UserError(f"data.validation = {run.data.validation!r}: nothing is held out; give a share, or a source")
    opened, problem = [], None
    for name, store in zip(corpus.names, corpus.stores, strict=True):
        try:
            opened.append((open_examples(store, split, run), name, store))
        except UserError as error:
            problem = problem or error
    # An evaluation passes over a source with too little to hold out; training needs all of them.
    if problem and (split == "train" or not opened):
        raise problem
    return opened


def _train_rows(corpus: Corpus, run: Run, many: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    order = Order(many.tolist(), run.seed, [[0, run.train.batch_size]], corpus.weights)
    for step in range(run.train.steps):
        for row, (source, index) in enumerate(zip(*order.rows(step), strict=True), 1):
            yield step + 1, row, int(source), int(index)


def _validation_rows(run: Run, many: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    ends, size = np.cumsum(many), run.train.batch_size
    shuffle = Shuffle(int(ends[-1]), seed=0)
    for place in range(min(int(ends[-1]), run.train.eval_batches * size)):
        (number,) = shuffle(np.array([place]))
        source = int(np.searchsorted(ends, number, side="right"))
        yield place // size + 1, place % size + 1, source, int(number - (ends[source - 1] if source else 0))


class _Decoding:
    def __init__(self, tokenizer: Tokenizer, packing: str) -> None:
        self.end_of_text = tokenizer.end_of_text
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes()
        self._names = {token: name for name, token in tokenizer.special_tokens.items()}
        self._packing = packing

    def name(self, token: int) -> str:
        """What a token that stands for no text is called."""
        return self._names.get(token, "end of text" if token == self.end_of_text else f"token {token}")

    def example(self, step: int, row: int, source: str, batch: Batch) -> Example:
        """The only row of a batch."""
        inputs, targets, weights = (part[0] for part in (batch.inputs_BT, batch.targets_BT, batch.weights_BT))
        used = self._used(inputs, targets, weights)
        starts = [0]
        for place in range(1, used):
            if batch.segments_BT is not None:
                is_border = batch.segments_BT[0, place] != batch.segments_BT[0, place - 1]
            else:
                is_border = targets[place - 1] != inputs[place]
            if is_border:
                starts.append(place)
        parts: list[Part] = []
        for start, end in zip(starts, [*starts[1:], used], strict=True):
            ids = [int(inputs[start]), *targets[start:end].tolist()]
            learned = [False, *(weights[start:end] > 0).tolist()]
            first = start if batch.positions_BT is None else int(batch.positions_BT[0, start])
            parts += self._parts(ids, learned, first)
        return Example(step, row, source, parts, int((weights > 0).sum()), len(inputs) - used)

    def _used(self, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> int:
        # Padding is what end of text follows end of text in, to no one's learning.
        if self._packing == "stream":
            return len(inputs)
        is_token = (inputs != self.end_of_text) | (targets != self.end_of_text) | (weights > 0)
        return int(np.flatnonzero(is_token)[-1]) + 1

    def _parts(self, ids: list[int], learned: list[bool], first: int) -> Iterator[Part]:
        # A window of a stream may hold several documents.
        start, last = 0, len(ids) - 1
        for place, token in enumerate(ids):
            ends = token == self.end_of_text
            if place == last or (ends and self._packing == "stream"):
                here = slice(start, place + 1)
                positions = range(first + start, first + min(place + 1, last))  # the last token is a target alone
                yield Part(self._pieces(ids[here], learned[here]), positions, ends)
                start = place + 1

    def _pieces(self, ids: Sequence[int], learned: Sequence[bool]) -> list[Piece]:
        pieces: list[Piece] = []
        decoder = StreamDecoder(self._tokenizer)

        def add(text: str, is_learned: bool) -> None:
            if pieces and not pieces[-1].special and pieces[-1].learned == is_learned:
                pieces[-1] = Piece(pieces[-1].text + text, is_learned)
            elif text:
                pieces.append(Piece(text, is_learned))

        before = False
        for token, is_learned in zip(ids, learned, strict=True):
            if token < len(self._token_bytes) and self._token_bytes[token]:
                add(decoder.push(token), is_learned)
            else:
                add(decoder.flush(), before)
                pieces.append(Piece(self.name(token), is_learned, special=True))
            before = is_learned
        add(decoder.flush(), before)
        return pieces
