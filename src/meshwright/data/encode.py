"""Documents to tokens, a block at a time: the same bytes in this process, in others beside it, or on a cluster.

documents ─▶ blocks ─▶ Encoder.encode ─▶ EncodedBlock ─▶ split writers
"""

import hashlib
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwright.data.documents import Document, Source
from meshwright.data.store import REJECTED
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.data.chat import Template

# A block is full at either: the one bounds the memory of long documents, the other of many short ones.
BLOCK_CHARACTERS, BLOCK_DOCUMENTS = 2 << 20, 1 << 14
PIECE_CHARACTERS = 1 << 18
BORDER_SEARCH = 1 << 14

# Where a long document may be cut, best first; matched against reversed text, the cut lies at the end of the match.
BORDERS = [re.compile(pattern) for pattern in (r"[^\W\d_] (?=[^\W\d_])", r"\S(?=\n\S)", r"(?=\n)")]

# Left-out documents that a manifest names; the rest are counted.
NAMED_FAULTS = 10
NAMED_KINDS = 50

Progress = Callable[[str, int, int | None, int, int], None]
"""Called with the stage, bytes done, bytes in all (None: not known), tokens and documents so far.

Bytes are those on disk where the source knows them, else of the text.
"""


class Mark(NamedTuple):
    """How far a source has been read."""

    documents: int
    """Documents before this place, those with a fault too."""
    place: tuple[int, int]
    """`Document.place` of the last of them."""
    read: int | None
    """Bytes on disk that were read for them; None: the source doesn't say."""


class Block(NamedTuple):
    """Documents that are encoded together."""

    documents: list[Document]
    characters: int
    mark: Mark
    """The place after the last document."""


@dataclass
class EncodedBlock:
    """What became of a block's documents; arrays by document leave out those with a fault."""

    tokens: np.ndarray
    """uint16 where the vocabulary fits, else uint32; end of text after each document."""
    weights: np.ndarray | None
    """uint8, one a token, as `meshwright.data.store` has them. None: all are to be learned."""
    ends: np.ndarray
    """int64: the position past each document's end of text."""
    digests: list[bytes]
    """16 bytes a document, of its content."""
    sizes: np.ndarray
    """int64: UTF-8 bytes of each document."""
    faults: list[tuple[str, str]]
    """Name and fault of each document that can't be used."""


@dataclass
class LeftOut:
    """Documents that can't be used: how many, of which kinds, and which, the first few.

    Arguments:
        stop: whether the first one is an error.
    """

    stop: bool = False
    documents: int = 0
    examples: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, fault: str) -> None:
        """Count one more.

        Raises:
            UserError: under `stop`.
        """
        # Names of files and of columns may hold what isn't UTF-8, and a manifest can't.
        name, fault = (part.encode(errors="backslashreplace").decode() for part in (name, fault))
        if self.stop:
            raise UserError(
                f"data.on_bad = 'stop': {name}: {fault}; mend it, or set data.on_bad = \"skip\" to leave it out"
            )
        self.documents += 1
        if len(self.examples) < NAMED_FAULTS:
            self.examples.append(f"{name}: {fault}")
        kind = re.split(r" \(|: ", fault)[0]
        kind = kind if kind in self.kinds or len(self.kinds) < NAMED_KINDS else "of other kinds"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """What a manifest says."""
        return {"documents": self.documents, "examples": self.examples, "kinds": self.kinds}


class Encoder:
    """Makes tokens of documents.

    Arguments:
        tokenizer: what encodes.
        template: for conversations; with it, every block has weights.
        normalize: as `data.normalize`.
        batch_characters: text that the tokenizer gets at once.
        pairs: whether a document is a chosen and a rejected conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: "Template | None" = None,
        normalize: str = "none",
        batch_characters: int = BLOCK_CHARACTERS,
        *,
        pairs: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._begin = [np.array(tokenizer.beginning, id_type(tokenizer))] if tokenizer.beginning else []
        self._normalize = normalize
        self._batch_characters = batch_characters
        self._dtype = id_type(tokenizer)
        self._template = template
        self._pairs = pairs

    def encode(self, documents: Iterable[Document]) -> EncodedBlock:
        """Encode documents, in order, each followed by end of text. Safe to call from several threads."""
        block = _Gathered(self._dtype, self._tokenizer.end_of_text, weighted=self._template is not None)
        texts: list[tuple[bytes, int, list[str]]] = []
        for document in documents:
            document = self._fitting(checked(document, self._normalize))
            if document.messages and not document.fault:
                self._gather(texts, block)
                document = self._conversation(document, block)
            if document.fault:
                block.faults.append((document.name, document.fault))
            elif not document.messages:
                texts.append((*digest_and_size(document), list(cut(document.text))))
        self._gather(texts, block)
        return block.whole()

    def _gather(self, texts: list[tuple[bytes, int, list[str]]], block: "_Gathered") -> None:
        ids = self._ids([piece for _, _, pieces in texts for piece in pieces])
        for digest, size, pieces in texts:
            block.add(digest, size, [*self._begin, *(next(ids) for _ in pieces)])
        texts.clear()

    def _ids(self, pieces: list[str]) -> Iterator[np.ndarray]:
        start = 0
        while start < len(pieces):
            end, characters = start, 0
            while end < len(pieces) and characters < self._batch_characters:
                characters += len(pieces[end])
                end += 1
            for ids in self._tokenizer.encode_batch(pieces[start:end]):
                yield np.asarray(ids, self._dtype)
            start = end

    def _conversation(self, document: Document, block: "_Gathered") -> Document:
        if self._template is None:
            return document._replace(fault="a conversation (set data.chat to the template that writes it as text)")
        conversations = [document.messages, document.rejected] if self._pairs else [document.messages]
        if self._pairs and (fault := _no_choice(*conversations)):
            return document._replace(fault=fault)
        ids: list[int] = []
        weights: list[int] = []
        try:
            for number, messages in enumerate(conversations):
                here, learned = self._template.encode(messages, last_alone=self._pairs)
                end_weight = self._template.end_weight(messages)
                if self._pairs and not end_weight:
                    raise ValueError("no answer (the last turn isn't the assistant's)")
                ids += [*([self._tokenizer.end_of_text] * number), *here]
                weights += [(REJECTED * number) | one for one in (*learned, end_weight)]
        except ValueError as error:
            return document._replace(fault=str(error))
        block.add(*digest_and_size(document), [np.asarray(ids, self._dtype)], np.array(weights, np.uint8))
        return document

    def _fitting(self, document: Document) -> Document:
        """The document, with a fault where it is a pair and none is wanted, or the other way round."""
        if document.fault or self._pairs == bool(document.messages and document.rejected):
            return document
        wanted = 'not a pair (data.packing = "pairs" needs a chosen and a rejected conversation)'
        return document._replace(fault=wanted if self._pairs else 'a pair (set data.packing = "pairs")')


def _no_choice(chosen: Sequence[dict[str, str]], rejected: Sequence[dict[str, str]]) -> str:
    """Why two conversations give nothing to choose between."""
    if list(chosen) == list(rejected):
        return "the same answer twice"
    if chosen[0]["role"] != "assistant" and chosen[0] != rejected[0]:
        return "two prompts (chosen and rejected begin differently)"
    return ""


class _Gathered:
    def __init__(self, dtype: np.dtype, end_of_text: int, weighted: bool) -> None:
        self._tokens = [np.empty(0, dtype)]
        self._end = np.array([end_of_text], dtype)
        self._weights: list[np.ndarray] | None = [np.empty(0, np.uint8)] if weighted else None
        self._ends: list[int] = []
        self._digests: list[bytes] = []
        self._sizes: list[int] = []
        self.faults: list[tuple[str, str]] = []

    def add(self, digest: bytes, size: int, ids: list[np.ndarray], weights: np.ndarray | None = None) -> None:
        length = sum(map(len, ids)) + 1
        self._tokens += [*ids, self._end]
        if self._weights is not None:
            self._weights.append(np.ones(length, np.uint8) if weights is None else weights)
        self._ends.append((self._ends[-1] if self._ends else 0) + length)
        self._digests.append(digest)
        self._sizes.append(size)

    def whole(self) -> EncodedBlock:
        return EncodedBlock(
            tokens=np.concatenate(self._tokens),
            weights=None if self._weights is None else np.concatenate(self._weights),
            ends=np.array(self._ends, np.int64),
            digests=self._digests,
            sizes=np.array(self._sizes, np.int64),
            faults=self.faults,
        )


def blocks(source: Source, after: Mark | None = None) -> Iterator[Block]:
    """The documents of a source in blocks of about 2 MB of text; a longer document is a block of its own.

    Arguments:
        source: a source that can't go on after a place is read from its beginning, the documents before it dropped.
        after: where to go on.
    """
    number = after.documents if after else 0
    documents: list[Document] = []
    characters = 0

    def block() -> Block:
        return Block(documents, characters, Mark(number, documents[-1].place, getattr(source, "bytes_read", None)))

    for document in _documents(source, after):
        documents.append(document)
        number += 1
        characters += len(document.text) + sum(len(message["content"]) for message in document.turns)
        if characters >= BLOCK_CHARACTERS or len(documents) >= BLOCK_DOCUMENTS:
            yield block()
            documents, characters = [], 0
    if documents:
        yield block()


def checked(document: Document, normalize: str = "none") -> Document:
    """A document as it is to be encoded: normalised, or with a fault where it can't be used."""
    if document.fault:
        return document
    if not document.text and not document.messages:
        return document._replace(fault="empty")
    texts = [document.text, *(message["content"] for message in document.turns)]
    if any("\0" in text for text in texts):
        return document._replace(text="", messages=(), rejected=(), fault="NUL byte")
    try:
        for text in texts:
            for start in range(0, len(text), PIECE_CHARACTERS):
                text[start : start + PIECE_CHARACTERS].encode()
    except UnicodeEncodeError:
        return document._replace(text="", messages=(), rejected=(), fault="holds half a character (a lone surrogate)")
    if normalize == "none":
        return document
    form: Any = normalize.upper()
    messages, rejected = (
        tuple({**one, "content": unicodedata.normalize(form, one["content"])} for one in conversation)
        for conversation in (document.messages, document.rejected)
    )
    return document._replace(text=unicodedata.normalize(form, document.text), messages=messages, rejected=rejected)


def digest_and_size(document: Document) -> tuple[bytes, int]:
    """BLAKE2b of a usable document's content, 16 bytes, and the UTF-8 bytes of its text.

    Of a conversation, the digest is of its messages as JSON with sorted keys and no spaces; of a pair, of a list of
    both conversations.
    """
    digest = hashlib.blake2b(digest_size=16)
    if document.messages:
        said = [document.messages, document.rejected] if document.rejected else document.messages
        form = json.dumps(said, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        digest.update(form.encode())
        return digest.digest(), sum(len(message["content"].encode()) for message in document.turns)
    size = 0
    for start in range(0, len(document.text), PIECE_CHARACTERS):
        data = document.text[start : start + PIECE_CHARACTERS].encode()
        digest.update(data)
        size += len(data)
    return digest.digest(), size


def is_held_out(digest: bytes, share: float) -> bool:
    """Whether a document belongs to the validation split.

    It does when the first 8 bytes of its digest, as a fraction of 2^64, lie below the share: that depends on its
    content alone, so a duplicate lands on the same side, and so does every document when others come or go.
    """
    return int.from_bytes(digest[:8], "big") < int(share * 2**64)


def id_type(tokenizer: Tokenizer) -> np.dtype:
    """The type that holds a tokenizer's ids: uint16 where they fit, else uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


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


def _documents(source: Source, after: Mark | None) -> Iterator[Document]:
    read: Callable[..., Iterator[Document]] = source.documents
    if after is None:
        yield from read()
    elif "after" in inspect.signature(read).parameters:
        yield from read(after=after.place)
    else:
        for number, document in enumerate(read()):
            if number >= after.documents:
                yield document
