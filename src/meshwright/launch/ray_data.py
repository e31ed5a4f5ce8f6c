"""Prepare on a Ray cluster, as a Ray Data pipeline.

parts of the source ─▶ read, a task for every so many megabytes ─▶ encode, a task a block ─▶ here, in the order read

What comes out is what `encode_in_order` makes of the same source, but for where a block ends.
"""

import os
import pickle
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.config import Run
from meshwright.data.chat import Template
from meshwright.data.documents import Document, PlacedSource, Source
from meshwright.data.encode import EncodedBlock, Encoder, Mark, blocks
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.workers import WORKER_CHARACTERS, Task
from meshwright.errors import UserError
from meshwright.launch.ray_cluster import ray_cluster

# Files are read together up to so many bytes: a task of Ray's costs some 20 ms.
GROUP_BYTES = 64 << 20

# One that reads keeps so many busy that encode. Blocks of files read ahead wait for those of the first in memory.
CPUS_A_READER = 16

# A block of Ray Data's is full at so many bytes: each of ours becomes one.
_BLOCK_BYTES = 1 << 19


class Work(NamedTuple):
    """What all tasks share; sent to a node once."""

    source: PlacedSource | None
    """None: it is read by the driver."""
    tokenizer: bytes
    """The pickle of a tokenizer, and of a template or None."""
    normalize: str
    pairs: bool = False
    """Whether a document is a chosen and a rejected conversation."""


class Group(NamedTuple):
    """Parts of a source that are read by one task."""

    number: int
    first: int
    end: int
    after: tuple[int, int] | None
    """The place in the first part to go on from."""


class RayEncoding:
    """A way to encode, for `meshwright.data.prepare.prepare`; connects to the cluster when it is first called.

    Arguments:
        run: `launch.address` is read.
    """

    def __init__(self, run: Run) -> None:
        self._address = run.launch.address
        self._closing = ExitStack()
        self._ray: Any = None

    def __enter__(self) -> "RayEncoding":
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def __call__(
        self, source: Source, after: Mark | None, task: Task, tokenizer: Tokenizer, processes: int
    ) -> Generator[tuple[Mark, EncodedBlock], None, None]:
        """Encode the documents of a source.

        Arguments:
            source: one without `parts` is read here, in the driver.
            after: where to go on; files before it aren't opened.
            task: its template, normalisation and pairs are used.
            tokenizer: what encodes.
            processes: the most tasks that encode at a time; 0: as many as the cluster has CPUs.

        Returns:
            For each block in turn, the place after it and what became of it.

        Raises:
            UserError: a node can't open a file, or there is no cluster.
        """
        if self._ray is None:
            self._ray = self._closing.enter_context(ray_cluster(self._address, "launch.kind = 'ray'"))
        if hasattr(source, "parts"):
            yield from _placed(self._ray, source, after, task, tokenizer, processes)
        else:
            yield from _unplaced(self._ray, source, after, task, tokenizer, processes)


def encode_groups(
    ray: Any, work: Any, groups: Sequence[Group], processes: int = 0
) -> Generator[tuple[int, Mark, EncodedBlock], None, None]:
    """Read and encode groups of a source's parts on the cluster, a bounded number of blocks ahead.

    Arguments:
        ray: the module, connected.
        work: of `ray.put`, a `Work`.
        groups: in the order in which their blocks come.
        processes: the most tasks that encode at a time; 0: as many as the cluster has CPUs.

    Returns:
        The number of the group of each block, the mark within the group, and the block.

    Raises:
        UserError: a node can't open a file or the tokenizer.
    """
    if not groups:
        return
    readers = 1 + int(ray.cluster_resources().get("CPU", 1)) // CPUS_A_READER
    size = ray.data.TaskPoolStrategy
    form: Any = {"batch_size": None, "batch_format": "pyarrow"}
    rows = ray.data.from_items([{"row": pickle.dumps(group)} for group in groups], override_num_blocks=len(groups))
    context = rows.context  # a copy of its own
    context.execution_options.preserve_order = True
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = context.print_on_execution_start = False
    # A reader that waits for room must not hold a CPU that one that encodes, and so makes room, waits for.
    rows = rows.map_batches(partial(_read, [work]), num_cpus=0, compute=size(readers), **form)
    rows = rows.map_batches(partial(_encode, [work]), num_cpus=1, compute=size(processes or None), **form)
    with closing(iter(rows.iter_batches(prefetch_batches=1, **form))) as batches, _explained(ray):
        for batch in batches:
            for row in _rows(batch):
                if isinstance(row, str):
                    raise UserError(row)
                yield row


def group_parts(parts: Sequence[PlacedSource], after: tuple[int, int] | None = None) -> tuple[list[Group], list[int]]:
    """Neighbouring parts in groups of about 64 MB on disk; a larger part is a group of its own.

    Arguments:
        parts: of a source; the places of part i are `(i, …)`.
        after: the place to go on from; parts before it are left out.

    Returns:
        The groups, and of each the bytes on disk before it.
    """
    sizes = [part.describe().get("bytes", GROUP_BYTES) for part in parts] if len(parts) > 1 else [0]
    before = [0, *accumulate(sizes)]
    groups: list[Group] = []
    first = after[0] if after else 0
    while first < len(parts):
        end = max(first + 1, bisect_right(before, before[first] + GROUP_BYTES) - 1)
        groups.append(Group(len(groups), first, end, None if groups else after))
        first = end
    return groups, [before[group.first] for group in groups]


def make_work(
    source: PlacedSource | None, tokenizer: Tokenizer, template: Template | None, normalize: str, *, pairs: bool = False
) -> Work:
    """What tasks need to know to read and encode."""
    return Work(source, pickle.dumps((tokenizer, template)), normalize, pairs)


def _placed(
    ray: Any, source: Any, after: Mark | None, task: Task, tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Mark, EncodedBlock], None, None]:
    groups, bytes_before = group_parts(source.parts(), after.place if after else None)
    work = ray.put(make_work(source, tokenizer, task.template, task.normalize, pairs=task.pairs))
    documents = documents_before = after.documents if after else 0
    current = 0
    with closing(encode_groups(ray, work, groups, processes)) as encoded:
        for number, mark, block in encoded:
            if number != current:
                current, documents_before = number, documents
            documents = documents_before + mark.documents
            read = None if mark.read is None else bytes_before[number] + mark.read
            yield Mark(documents, mark.place, read), block


def _unplaced(
    ray: Any, source: Source, after: Mark | None, task: Task, tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Mark, EncodedBlock], None, None]:
    work = ray.put(make_work(None, tokenizer, task.template, task.normalize, pairs=task.pairs))
    ahead = 2 * (processes or int(ray.cluster_resources().get("CPU", 1)))
    encode = ray.remote(num_cpus=1)(_encode_documents)
    pending: deque[tuple[Mark, Any]] = deque()

    def oldest() -> tuple[Mark, EncodedBlock]:
        mark, reference = pending.popleft()
        with _explained(ray):
            encoded = ray.get(reference)
        if isinstance(encoded, str):
            raise UserError(encoded)
        return mark, encoded

    for block in blocks(source, after):
        pending.append((block.mark, encode.remote([work], block.documents)))
        if len(pending) > ahead:
            yield oldest()
    while pending:
        yield oldest()


@contextmanager
def _explained(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        if missing := re.search(r"No module named '([^']+)'", str(error)):
            raise UserError(
                f"a node of the Ray cluster can't import {missing[1]}; install the same Meshwright on every node, and "
                "what a source of your own needs"
            ) from None
        raise


class _Joined:
    """Parts of a source, one after another."""

    def __init__(self, parts: Sequence[PlacedSource]) -> None:
        self._parts = parts
        self.bytes_read = 0

    def describe(self) -> dict[str, Any]:
        return {}

    def documents(self, after: tuple[int, int] | None = None) -> Iterator[Document]:
        before = 0
        for number, part in enumerate(self._parts):
            for document in part.documents(after=None if number else after):
                self.bytes_read = before + part.bytes_read
                yield document
            before += part.bytes_read


# What follows runs in the cluster's processes. A user's mistake comes back as a string in place of what was to be made,
# since Ray wraps exceptions and logs them.


def _read(shared: list[Any], batch: Any) -> Iterator[Any]:
    for group in _rows(batch):
        try:
            parts = _parts(shared[0])[group.first : group.end]
            after = Mark(0, group.after, None) if group.after else None
            for documents, _, mark in blocks(_Joined(parts), after):
                yield _table((group.number, mark, documents))
        except (UserError, OSError) as error:
            yield _table(
                f"{error} (on the node {_node()}; a Ray cluster's nodes must all see the source's files, at the same "
                "paths or at an address such as s3://)"
            )


def _encode(shared: list[Any], batch: Any) -> Iterator[Any]:
    for row in _rows(batch):
        if not isinstance(row, str):
            encoded = _encode_documents(shared, row[2])
            row = encoded if isinstance(encoded, str) else (*row[:2], encoded)
        yield _table(row)


def _encode_documents(shared: list[Any], documents: list[Document]) -> EncodedBlock | str:
    try:
        return _encoder(shared[0]).encode(documents)
    except UserError as error:
        return f"{error} (on the node {_node()})"


@lru_cache(maxsize=2)
def _parts(reference: Any) -> list[PlacedSource]:
    return _work(reference).source.parts()


@lru_cache(maxsize=2)
def _encoder(reference: Any) -> Encoder:
    # Before the tokenizer's library starts its threads: the cluster has a process for each CPU.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    work = _work(reference)
    try:
        tokenizer, template = pickle.loads(work.tokenizer)
    except Exception as error:  # tiktoken's are opened by name, and may not be there
        raise UserError(f"tokenizer.kind: can't be opened ({type(error).__name__}: {error})") from None
    return Encoder(tokenizer, template, work.normalize, WORKER_CHARACTERS, pairs=work.pairs)


def _work(reference: Any) -> Any:
    import ray

    return ray.get(reference)


def _node() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _table(value: Any) -> Any:
    import pyarrow

    return pyarrow.table({"row": [pickle.dumps(value, pickle.HIGHEST_PROTOCOL)]})


def _rows(batch: Any) -> Iterator[Any]:
    return (pickle.loads(row.as_buffer()) for row in batch["row"])
