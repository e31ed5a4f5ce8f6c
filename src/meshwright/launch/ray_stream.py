"""Training from a Ray Data stream: tokens are made on the way, for a corpus too large to prepare.

files, in another order each pass ─▶ read, encode (`ray_data`) ─▶ windows ─▶ shuffle buffer ─▶ batches, in a thread

The order depends on the run's seed and the step at which training starts or goes on, and on nothing else. One that goes
on starts a pass of its own: what was read before isn't known any more.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from meshwright.config import Run
from meshwright.data.chat import make_template
from meshwright.data.corpus import Corpus
from meshwright.data.documents import PlacedSource
from meshwright.data.encode import EncodedBlock, LeftOut, Progress
from meshwright.data.examples import Batch
from meshwright.data.mixing import Mixing, stages_of
from meshwright.data.order import BatchSizes, first_example
from meshwright.data.prepare import prepare
from meshwright.data.recipes import names_of
from meshwright.data.sources import open_source
from meshwright.data.store import Store, is_store
from meshwright.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from meshwright.data.training_text import training_texts
from meshwright.errors import UserError
from meshwright.launch.ray_cluster import ray_cluster
from meshwright.launch.ray_data import encode_groups, group_parts, make_work

# Tokens of a source that the shuffle buffer holds: some 16 MB of text. The first batch comes when it is full.
SHUFFLE_TOKENS = 4 << 20
BATCHES_AHEAD = 8

Example = tuple[np.ndarray, np.ndarray]
"""Tokens `[T + 1]`, and 1 for each of the last T that is to be learned, else 0: `[T]`."""


@dataclass(frozen=True)
class StreamCorpus(Corpus):
    """Sources that aren't prepared; of stores it has that of what is held out, or none.

    Arguments:
        sources: open.
        encoder: their tokenizer.
    """

    sources: list[PlacedSource]
    encoder: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Changes when a source's listing or the tokenizer does."""
        listed = ["stream", self.encoder.fingerprint, *(source.describe()["fingerprint"] for source in self.sources)]
        return hashlib.blake2b("\n".join(listed).encode(), digest_size=32).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """What encodes."""
        return self.encoder

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.encoder.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        """The tokenizer's."""
        return self.encoder.fingerprint


def open_stream(
    run: Run, progress: Progress, note: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> StreamCorpus:
    """The sources of a run with `data.stream`; what is held out is prepared.

    Arguments:
        run: the run.
        progress: called as `Progress` says.
        note: called with a line to show.
        tokenizer: the run's, where it is there; None: it is opened, or trained on the first 64 MB of the sources.

    Raises:
        UserError: a source can't be read, or is a store; or the tokenizer can't be had.
    """
    listed, data = run.data.sources, run.data
    for one in listed:
        if one.source.endswith(".bin") or is_store(one.source):
            raise UserError(f"data.train = {one.source!r}: is prepared already; leave out data.stream")
    sources = [open_source(one.source, one) for one in listed]
    if tokenizer is None and run.tokenizer.kind == "bpe":
        texts = training_texts([(one, None) for one in sources], 0.0, data.normalize, data.on_bad == "stop", progress)
        tokenizer = train_bpe(texts, run.tokenizer.vocab_size)
    tokenizer = tokenizer or open_tokenizer(run.tokenizer.kind, run.tokenizer.add_bos)
    weights = [[(0, one.weight), *((later.step, later.weight) for later in one.later)] for one in listed]
    held_out: list[Store] = []
    if isinstance(data.validation, str):
        source = open_source(data.validation, data, "data.validation")
        alone = {"train": data.validation, "validation": 0.0, "stream": False}
        of_its_own = run.model_copy(update={"data": data.model_copy(update=alone)})
        (store,) = prepare(of_its_own, source=source, on_progress=progress, on_note=note, tokenizer=tokenizer).stores
        swapped = {"train": store.split("validation"), "validation": store.split("train")}
        held_out = [Store(store.path, store.manifest, swapped)]
    return StreamCorpus(held_out, names_of([one.source for one in listed]), weights, sources, tokenizer)


class StreamFeed:
    """Makes a run's examples on a Ray cluster; connected as long as the block lasts.

    Arguments:
        run: one with `data.stream`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._closing = ExitStack()

    def __enter__(self) -> "StreamFeed":
        self._ray = self._closing.enter_context(ray_cluster(self._run.launch.address, "data.stream = true"))
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def corpus(self, progress: Progress, note: Callable[[str], None]) -> Corpus:
        self._corpus = open_stream(self._run, progress, note)
        return self._corpus

    def examples(self, batch_sizes: BatchSizes, note: Callable[[str], None]) -> "StreamData":
        return StreamData(self._ray, self._run, self._corpus, batch_sizes, note)


class StreamData:
    """The examples of a stream, in batches.

    Arguments:
        ray: the module, connected.
        run: the run.
        corpus: its sources.
        batch_sizes: of the steps so far, the last also of those to come.
        note: told in the end what was left out.

    Raises:
        UserError: the sources' weights can't be used.
    """

    padding = 0.0

    def __init__(
        self, ray: Any, run: Run, corpus: StreamCorpus, batch_sizes: BatchSizes, note: Callable[[str], None]
    ) -> None:
        stages = stages_of(corpus.weights)
        self._mixing = Mixing([(first_example(batch_sizes, step), shares) for step, shares in stages])
        self._run, self._corpus, self._batch_sizes, self._note = run, corpus, batch_sizes, note
        self._passes = [_Passes(ray, run, corpus, index) for index in range(len(corpus.sources))]

    def batches(self, start_step: int, rows: np.ndarray | slice | None = None) -> Iterator[Batch]:
        """The batches of the steps from `start_step` to the run's last, made in a thread."""
        try:
            with closing(_ahead(self._batches(start_step, slice(None) if rows is None else rows))) as batches:
                yield from batches
        finally:
            for one in self._passes:
                if one.left_out.documents:
                    found = f"{one.left_out.documents:,} documents left out, the first {one.left_out.examples[0]}"
                    self._note(f"{one.name}: {found}")

    def taken(self, step: int) -> dict[str, float]:
        """`epochs`, passes that this call has finished reading; of several sources by name, with `tokens`."""
        if len(self._passes) == 1:
            return {"epochs": float(self._passes[0].finished)}
        tokens = self._mixing.counts(first_example(self._batch_sizes, step)) * self._run.train.sequence_length
        taken = {f"epochs/{one.name}": float(one.finished) for one in self._passes}
        return taken | {f"tokens/{one.name}": float(many) for one, many in zip(self._passes, tokens, strict=True)}

    def _batches(self, start_step: int, rows: np.ndarray | slice) -> Iterator[Batch]:
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(one.examples(start_step))) for one in self._passes]
            for step in range(start_step, self._run.train.steps):
                first, end = (first_example(self._batch_sizes, number) for number in (step, step + 1))
                taken = [next(streams[source]) for source in self._mixing.place(np.arange(first, end))[0].tolist()]
                tokens = np.stack([tokens for tokens, _ in taken]).astype(np.int32)[rows]
                weights = np.stack([weights for _, weights in taken]).astype(np.float32)[rows]
                yield Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), weights)


class _Passes:
    """One source, over and over."""

    def __init__(self, ray: Any, run: Run, corpus: StreamCorpus, index: int) -> None:
        self.name = corpus.names[index]
        self.finished = 0
        self.left_out = LeftOut(run.data.on_bad == "stop")
        self._ray, self._run, self._index, self._source = ray, run, index, corpus.sources[index]
        chat = run.data.sources[index].chat
        template = make_template(chat, corpus.encoder) if chat else None
        self._work = make_work(self._source, corpus.encoder, template, run.data.normalize)

    def examples(self, start_step: int) -> Generator[Example, None, None]:
        """Examples without end; each pass has every window of its files' text once."""
        length = self._run.train.sequence_length
        choose = np.random.default_rng([self._run.seed, start_step, self._index])
        groups, _ = group_parts(self._source.parts())
        work = self._ray.put(self._work)
        for finished in count(1):
            shuffled = [groups[place] for place in choose.permutation(len(groups))]
            blocks = encode_groups(self._ray, work, shuffled, self._run.data.processes)
            found = False
            with closing(blocks):
                for example in _mixed(_windows(self._usable(blocks), length), max(SHUFFLE_TOKENS // length, 1), choose):
                    found = True
                    yield example
            if not found:
                raise UserError(
                    f"data.train, source {self.name!r}: a pass over it gives no example of train.sequence_length = "
                    f"{length}; give it more text, or shorten the sequence"
                )
            self.finished = finished

    def _usable(self, blocks: Iterator[tuple[int, Any, EncodedBlock]]) -> Iterator[EncodedBlock]:
        for _, _, block in blocks:
            for name, fault in block.faults if not self.finished else ():
                self.left_out.add(name, fault)
            yield block


def _windows(blocks: Iterator[EncodedBlock], length: int) -> Iterator[Example]:
    tokens, weights = np.empty(0, np.uint16), np.empty(0, np.uint8)
    for block in blocks:
        tokens = np.concatenate([tokens, block.tokens])
        added = np.ones(len(block.tokens), np.uint8) if block.weights is None else block.weights
        weights = np.concatenate([weights, added])
        many = max(len(tokens) - 1, 0) // length
        for start in range(0, many * length, length):
            # Copies: a view would keep the whole block in memory.
            end = start + length + 1
            yield tokens[start:end].copy(), weights[start + 1 : end].copy()
        tokens, weights = tokens[many * length :], weights[many * length :]


def _mixed(examples: Iterator[Example], size: int, choose: np.random.Generator) -> Iterator[Example]:
    held: list[Example] = []
    for example in examples:
        if len(held) < size:
            held.append(example)
            continue
        place = int(choose.integers(size))
        yield held[place]
        held[place] = example
    for place in choose.permutation(len(held)):
        yield held[place]


def _ahead(batches: Iterator[Batch]) -> Generator[Batch, None, None]:
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES_AHEAD)
    closed = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                put(batch)
                if closed.is_set():
                    break
            put(None)
        except BaseException as error:
            put(error)
        finally:
            batches.close()  # type: ignore[attr-defined]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
