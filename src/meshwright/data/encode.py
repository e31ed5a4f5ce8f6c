"""Documents to tokens, in a memory that doesn't grow with the corpus.

    documents ─▶ sides (train, validation) ─▶ pieces ─▶ batches ─▶ encode_batch (all cores) ─▶ split writers

While one batch is encoded, the one before it is written and the next one read.
"""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.sources import Document, Source
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.writer import SplitWriter

# A batch is full at either: the one bounds the memory of long documents, the other of many short ones.
BATCH_CHARACTERS, BATCH_PIECES = 2 << 20, 1 << 14
PIECE_CHARACTERS = 1 << 18
BORDER_SEARCH = 1 << 14

# Where a long document may be cut, best first; matched against reversed text, the cut lies at the end of the match.
BORDERS = [re.compile(pattern) for pattern in (r"[^\W\d_] (?=[^\W\d_])", r"\S(?=\n\S)", r"(?=\n)")]

BPE_TRAINING_BYTES = 64 << 20

# Left-out documents that a manifest names; the rest are counted.
NAMED_FAULTS = 10

Progress = Callable[[str, int, int | None, int, int], None]
"""Called with the stage, bytes done, bytes in all (None: not known), tokens and documents so far."""


class Sided(NamedTuple):
    """A document and the split that it belongs to."""

    split: str
    document: Document
    digest: bytes
    """BLAKE2b of the text, 16 bytes."""
    size: int
    """UTF-8 bytes."""


class Piece(NamedTuple):
    """A document, or a part of a very long one."""

    split: str
    text: str
    size: int
    """UTF-8 bytes of the whole document in its last piece, else 0."""
    last: bool


@dataclass
class LeftOut:
    """Documents that can't be used: how many, and which, the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, document: Document) -> None:
        """Count one more."""
        self.count += 1
        if len(self.examples) < NAMED_FAULTS:
            self.examples.append(f"{document.name}: {document.fault}")


def sided(train: Source, validation: Source | float, left_out: LeftOut) -> Iterator[Sided]:
    """Every usable document with its split.

    With a share, a document is held out when the first 8 bytes of its hash, as a fraction of 2^64, lie below the
    share: it depends on the text alone, so a duplicate lands on the same side, and so does every document when others
    come or go. With a source of its own, its documents follow the training documents, as they are.

    Arguments:
        train: the corpus.
        validation: the share of its documents that is held out, or a corpus of its own.
        left_out: counts empty documents and those with a fault.
    """
    bound = int(validation * 2**64) if isinstance(validation, float) else 0
    for item in _usable(train, "train", left_out):
        held_out = int.from_bytes(item.digest[:8], "big") < bound
        yield item._replace(split="validation") if held_out else item
    if not isinstance(validation, float):
        yield from _usable(validation, "validation", left_out)


def bpe_texts(items: Iterable[Sided], total_bytes: int | None, progress: Progress) -> Iterator[str]:
    """What a byte-pair encoding is trained on: at most about 64 MB of the training documents.

    Of a larger corpus, a document is taken when another part of its hash lies below 64 MB's share of the total, so the
    choice is spread over the corpus; where the total isn't known, the first 64 MB.
    """
    share = min(1.0, BPE_TRAINING_BYTES / total_bytes) if total_bytes else 1.0
    bound = int(share * 2**64)
    read = reported = taken = documents = 0
    for item in items:
        read += item.size
        if read - reported >= BATCH_CHARACTERS:
            progress("train tokenizer", read, total_bytes, 0, documents)
            reported = read
        if item.split == "validation" or int.from_bytes(item.digest[8:], "big") >= bound:
            continue
        for text in cut(item.document.text):
            yield text
            taken += len(text)
            if taken >= BPE_TRAINING_BYTES:
                return
        documents += 1


def encode(
    items: Iterable[Sided],
    tokenizer: Tokenizer,
    writers: dict[str, SplitWriter],
    total_bytes: int | None,
    progress: Progress,
) -> None:
    """Encode documents, in order, each followed by end of text.

    Arguments:
        items: the documents with their splits.
        tokenizer: what encodes.
        writers: by split.
        total_bytes: for `progress`.
        progress: called once a batch, from this thread.
    """
    done = 0
    # Two threads, so that one batch's ids become Python objects (under the lock) while the next is in the library.
    with ThreadPoolExecutor(2) as pool:
        pending: deque[tuple[list[Piece], Future]] = deque()
        for batch in _batches(items):
            pending.append((batch, pool.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
            if len(pending) > 2:
                done += _write(*pending.popleft(), tokenizer.end_of_text, writers)
                _report(progress, done, total_bytes, writers)
        while pending:
            done += _write(*pending.popleft(), tokenizer.end_of_text, writers)
            _report(progress, done, total_bytes, writers)


def cut(text: str) -> Iterator[str]:
    """The text in pieces of at most 262,144 characters, cut where tokenizers break anyway.

    The cut is before the last space between two letters: the tokens are then those of the unbroken text, for every
    byte-pair rule in use and for SentencePiece. Where the last 16,384 characters of a piece have none, it is after
    their last line break, one between two signs that aren't blank if there is such; else at the limit. There a token
    or two may differ.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        backwards = text[end - BORDER_SEARCH : end][::-1]
        found = next((match for border in BORDERS if (match := border.search(backwards))), None)
        end -= found.end() if found else 0
        yield text[start:end]
        start = end
    yield text[start:]


def _usable(source: Source, split: str, left_out: LeftOut) -> Iterator[Sided]:
    for document in source.documents():
        if not document.fault and not document.text:
            document = document._replace(fault="empty")
        if not document.fault:
            try:
                digest, size = _digest(document.text)
            except UnicodeEncodeError:
                document = document._replace(fault="holds half a character (a lone surrogate)")
        if document.fault:
            left_out.add(document)
            continue
        yield Sided(split, document, digest, size)


def _digest(text: str) -> tuple[bytes, int]:
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        data = text[start : start + PIECE_CHARACTERS].encode()
        digest.update(data)
        size += len(data)
    return digest.digest(), size


def _batches(items: Iterable[Sided]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for item in items:
        left = len(item.document.text)
        for text in cut(item.document.text):
            left -= len(text)
            batch.append(Piece(item.split, text, 0 if left else item.size, last=not left))
            size += len(text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write(batch: list[Piece], future: Future, end_of_text: int, writers: dict[str, SplitWriter]) -> int:
    encoded: list[Any] = list(future.result())
    for split, writer in writers.items():
        parts: list[np.ndarray] = []
        ends: list[int] = []
        length = size = 0
        for piece, ids in zip(batch, encoded, strict=True):
            if piece.split != split:
                continue
            parts.append(np.asarray(ids, np.uint32))
            length += len(ids)
            size += piece.size
            if piece.last:
                parts.append(np.array([end_of_text], np.uint32))
                length += 1
                ends.append(length)
        if parts:
            writer.append(np.concatenate(parts), ends, size)
    return sum(piece.size for piece in batch)


def _report(progress: Progress, done: int, total_bytes: int | None, writers: dict[str, SplitWriter]) -> None:
    tokens = sum(writer.tokens for writer in writers.values())
    documents = sum(writer.documents for writer in writers.values())
    progress("encode", done, total_bytes, tokens, documents)
