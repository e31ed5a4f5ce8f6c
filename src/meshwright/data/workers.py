"""Blocks encoded in other processes beside this one, their results in the order of the blocks.

A worker is a fresh Python that reads pickles from its standard input and writes pickles to its standard output: no
fork, so threads of this process (JAX's) don't matter, and no import of the user's main module. When this process ends,
in whatever way, the pipe closes and the worker ends too.
"""

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from meshwright.cores import core_count
from meshwright.data.chat import Template
from meshwright.data.documents import Document
from meshwright.data.encode import BLOCK_CHARACTERS, Block, EncodedBlock, Encoder, Mark
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import UserError

# Text that this process encodes alone before it starts others: below that, starting them takes longer than it saves.
ALONE_CHARACTERS = 4 << 20

# Text that a worker's tokenizer gets at once: it has one thread, so more would only take memory.
WORKER_CHARACTERS = 1 << 18

_START = "import sys; sys.path[:] = sys.argv[1:]; from meshwright.data.workers import main; main()"
_HEADER = struct.Struct("<Q")
_THREADS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Task(NamedTuple):
    """What a worker needs to know to encode."""

    tokenizer: str
    """The folder that `Tokenizer.save` wrote."""
    template: Template | None = None
    """For conversations; pickled, so that what it keeps from when it was made (the date) is the same everywhere."""
    normalize: str = "none"
    pairs: bool = False
    """Whether a document is a chosen and a rejected conversation."""

    def encoder(self, tokenizer: Tokenizer | None = None, batch_characters: int = BLOCK_CHARACTERS) -> Encoder:
        """The encoder, of a tokenizer that is open already where one is given."""
        opened = tokenizer or load_tokenizer(Path(self.tokenizer))
        return Encoder(opened, self.template, self.normalize, batch_characters, pairs=self.pairs)


def encode_in_order(
    source: Iterator[Block], task: Task, tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Mark, EncodedBlock], None, None]:
    """Encode blocks; close the iterator to end the workers early.

    Arguments:
        source: read from this thread, a few blocks ahead.
        task: what is to be done.
        tokenizer: the one of the task, open.
        processes: how many work at once, after the first few megabytes; 1: this one, with all threads of the
            tokenizer's library; 0: one a core.

    Returns:
        For each block in turn, the place after it and what became of it.

    Raises:
        RuntimeError: a worker failed; with its traceback.
        UserError: a worker was killed.
    """
    processes = processes or core_count()
    here = task.encoder(tokenizer)
    alone = in_flight = 0
    workers: _Workers | None = None
    pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    # Two threads, so that one block's ids become Python objects (under the lock) while the next is in the library.
    threads = ThreadPoolExecutor(2)

    def oldest() -> tuple[Mark, EncodedBlock]:
        nonlocal in_flight
        block, future = pending.popleft()
        in_flight -= block.characters
        return block.mark, future.result()

    try:
        for block in source:
            if workers is None and processes > 1 and alone >= ALONE_CHARACTERS:
                workers = _Workers(processes, task)
            if workers is None:
                alone += block.characters
            future = workers.submit(block.documents) if workers else threads.submit(here.encode, block.documents)
            pending.append((block._replace(documents=[]), future))
            in_flight += block.characters
            ahead = 2 * processes if workers else 2
            # The second bound is for very long documents.
            while len(pending) > ahead or (pending and in_flight > 2 * (ahead + 1) * BLOCK_CHARACTERS):
                yield oldest()
        while pending:
            yield oldest()
    finally:
        if workers:
            workers.close()
        threads.shutdown(cancel_futures=True)


class _Workers:
    def __init__(self, count: int, task: Task) -> None:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker(task) for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)

    def submit(self, documents: list[Document]) -> "Future[EncodedBlock]":
        return self._threads.submit(self._encode, documents)

    def close(self) -> None:
        for worker in self._all:
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()

    def _encode(self, documents: list[Document]) -> EncodedBlock:
        worker = self._idle.get()
        try:
            return worker.encode(documents)
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, task: Task) -> None:
        environment = {**os.environ, **dict.fromkeys(_THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"}
        # In a session of its own a worker gets no Ctrl-C: this process does, and closes the pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._task: Task | None = task

    def encode(self, documents: list[Document]) -> EncodedBlock:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if self._task is not None:
                _send(self._process.stdin, self._task)
                self._task = None
            _send(self._process.stdin, documents)
            kind, value = _receive(self._process.stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            raise UserError(
                f"data.processes: a process that makes tokens ended ({_cause(code)}); where memory is short, lower it"
            ) from None
        if kind == "user error":
            raise UserError(value)
        if kind == "error":
            raise RuntimeError(f"a process that makes tokens failed:\n{value}")
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it never read can't be written any more
                pipe.close()


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main() -> None:
    """A worker: encode what comes in until no more does."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the results
    incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, incoming), daemon=True).start()
    task: Task = incoming.get()
    encoder: Encoder | None = None
    while True:
        documents = incoming.get()
        answer: tuple[str, Any]
        try:
            encoder = encoder or task.encoder(batch_characters=WORKER_CHARACTERS)
            answer = ("block", encoder.encode(documents))
        except UserError as error:
            answer = ("user error", str(error))
        except Exception:
            answer = ("error", traceback.format_exc())
        del documents
        try:
            _send(results, answer)
        except BrokenPipeError:
            os._exit(0)


def _read(stream: IO[bytes], incoming: "queue.SimpleQueue[Any]") -> None:
    # In a thread of its own, so that the end of the parent is seen while a block is being encoded.
    try:
        while True:
            incoming.put(_receive(stream))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _send(stream: IO[bytes], value: object) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    stream.write(_HEADER.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    return pickle.loads(_exactly(stream, _HEADER.unpack(_exactly(stream, _HEADER.size))[0]))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
