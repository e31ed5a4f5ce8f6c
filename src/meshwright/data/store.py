"""The token store: a folder with a manifest, flat little-endian shards of ids, and where each document ends.

manifest.json               what the store holds and was made from; without it, a folder is no store
train_00000.bin             ids, uint16 where the vocabulary fits, else uint32; end of text after each document
train_00000.weights         of conversations: uint8 a token, 1 where it is to be learned, else 0; of pairs see below
train_documents.bin         uint64: the position just past each document's end of text
validation_00000.bin        (and so on)
tokenizer/                  what `load_tokenizer` reads

A store of pairs (`pairs` in its manifest) has one document a pair: the tokens of the chosen conversation, end of text,
those of the rejected one, end of text. Weights are bits: `LEARNED`, and `REJECTED` for the second half.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import UserError

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
LEARNED, REJECTED = 1, 2

# Tokens looked at in one piece when a whole split must be read, and the places and their size when a sample will do.
SCAN_TOKENS = 1 << 22
SAMPLES, SAMPLE_TOKENS = 64, 1 << 15


class Split:
    """The tokens of one split, memory-mapped: opening costs nothing, reading is thread-safe.

    Arguments:
        name: `train` or `validation`.
        shards: arrays of ids that follow one another.
        end_of_text: the id after each document.
        document_ends: uint64, the position just past each document's end of text; None: found by scanning when asked.
        byte_count: UTF-8 bytes of the documents; None: not known.
        token_bytes: the bytes of each id, where `byte_count` may be counted by scanning when asked.
        weights: for each shard, uint8, 1 for a token that is to be learned, else 0; of a store of pairs bits, see
            above; None: all are to be learned.
    """

    def __init__(
        self,
        name: str,
        shards: list[np.ndarray],
        end_of_text: int,
        document_ends: np.ndarray | None = None,
        byte_count: int | None = None,
        token_bytes: list[bytes] | None = None,
        weights: list[np.ndarray] | None = None,
    ) -> None:
        self.name = name
        self.end_of_text = end_of_text
        self._shards = shards
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + len(shard))
        self.token_count = self._starts[-1]
        self._document_ends = document_ends
        self._byte_count = byte_count
        self._token_bytes = token_bytes
        self._weights = weights

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length`, across shards.

        Returns:
            int32 `[length]`, a copy.

        Raises:
            IndexError: the range isn't within the split.
        """
        return self._read(self._shards, start, length, np.int32)

    @property
    def is_weighted(self) -> bool:
        """Whether some tokens may not be there to be learned."""
        return self._weights is not None

    def read_weights(self, start: int, length: int) -> np.ndarray:
        """Which of tokens `start` to `start + length` are to be learned.

        Returns:
            float32 `[length]`: 1 where one is, else 0; of a store of pairs its bits, from 0 to 3.

        Raises:
            IndexError: the range isn't within the split.
        """
        if self._weights is None:
            self._check(start, length)
            return np.ones(length, np.float32)
        return self._read(self._weights, start, length, np.float32)

    def _check(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.token_count:
            raise IndexError(f"tokens {start} to {start + length} of {self.token_count}")

    def _read(self, shards: list[np.ndarray], start: int, length: int, dtype: type) -> np.ndarray:
        self._check(start, length)
        values: np.ndarray = np.empty(length, dtype)
        filled = 0
        shard = bisect_right(self._starts, start) - 1
        while filled < length:
            begin = start + filled - self._starts[shard]
            part = shards[shard][begin : begin + length - filled]
            values[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return values

    @cached_property
    def document_ends(self) -> np.ndarray:
        """uint64 `[documents]`: the position just past each document's end of text."""
        if self._document_ends is not None:
            return self._document_ends
        found = [start + 1 + np.flatnonzero(part == self.end_of_text) for start, part in self._parts()]
        ends = np.concatenate([*found, np.empty(0, np.int64)]).astype(np.uint64)
        if self.token_count and (not len(ends) or ends[-1] < self.token_count):
            ends = np.append(ends, np.uint64(self.token_count))
        return ends

    @property
    def document_count(self) -> int:
        """Documents in the split."""
        return len(self.document_ends)

    def document_range(self, index: int) -> tuple[int, int]:
        """Where document `index` starts, and how many tokens it has, its end of text included."""
        start = int(self.document_ends[index - 1]) if index else 0
        return start, int(self.document_ends[index]) - start

    def document(self, index: int) -> np.ndarray:
        """The tokens of document `index`, its end of text included: int32 `[length]`."""
        return self.read(*self.document_range(index))

    @cached_property
    def byte_count(self) -> int | None:
        """UTF-8 bytes of the documents' text; None where it isn't known."""
        if self._byte_count is not None or self._token_bytes is None:
            return self._byte_count
        sizes = np.array([len(value) for value in self._token_bytes], np.int64)
        return sum(int(sizes[part].sum()) for _, part in self._parts())

    @property
    def highest_id(self) -> int:
        """Of all tokens; reads them all. -1 where there are none."""
        return max((int(part.max()) for _, part in self._parts()), default=-1)

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, self.token_count, SCAN_TOKENS):
            yield start, self.read(start, min(SCAN_TOKENS, self.token_count - start))


class Store:
    """An open token store.

    Arguments:
        path: its folder (of a nanoGPT pair: `train.bin`).
        manifest: what `manifest.json` holds.
        splits: by name.
        tokenizer: where it isn't in the folder's `tokenizer/`.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], splits: dict[str, Split], tokenizer: Tokenizer | None = None
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._splits = splits
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Changes when a token or the tokenizer does; a checkpoint holds it."""
        return self.manifest["fingerprint"]

    @property
    def has_pairs(self) -> bool:
        """Whether its documents are pairs of answers."""
        return bool(self.manifest.get("pairs"))

    def split(self, name: str) -> Split:
        """The split `train` or `validation`."""
        return self._splits[name]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the store.

        Raises:
            UserError: its files are gone, or it is no longer the one that wrote the store.
        """
        if self._tokenizer is None:
            tokenizer = load_tokenizer(self.path / "tokenizer")
            if tokenizer.fingerprint != self.manifest["tokenizer"]["fingerprint"]:
                raise UserError(
                    f"{self.path / 'tokenizer'}: not the tokenizer that wrote the store (its fingerprint differs); "
                    "put the original back, or prepare the store anew"
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    @staticmethod
    def open(path: str | Path) -> "Store":
        """Open a store, and check that it is whole.

        Raises:
            UserError: no manifest, an incomplete store, another format, a missing file or one of the wrong size.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        splits = {}
        for name in SPLITS:
            entry = manifest["splits"][name]
            shards = [_map(path / shard["file"], dtype, shard["tokens"]) for shard in entry["shards"]]
            ends = _map(path / entry["documents_file"], np.dtype("<u8"), entry["documents"])
            weighted = any("weights" in shard for shard in entry["shards"])
            weights = [
                _map(path / shard["weights"], np.dtype(np.uint8), shard["tokens"])
                for shard in entry["shards"]
                if weighted
            ]
            splits[name] = Split(
                name,
                shards,
                manifest["tokenizer"]["end_of_text"],
                ends,
                entry["bytes"],
                weights=weights if weighted else None,
            )
        return Store(path, manifest, splits)


def is_store(path: str | Path) -> bool:
    """Whether a folder is a token store, be it one that can't be opened; other things have a `manifest.json`, too."""
    file = Path(path) / "manifest.json"
    if not os.path.isfile(file):  # false, too, for what can't be the name of a file
        return False
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(manifest, dict) and not {"format", "splits", "made_from"}.isdisjoint(manifest)


def open_nanogpt(train_bin: str | Path, validation_bin: str | Path, tokenizer: Tokenizer) -> Store:
    """Open nanoGPT's `train.bin` and `val.bin` (uint16 ids, no header) where they lie; nothing is written.

    Arguments:
        train_bin: the training split.
        validation_bin: the validation split.
        tokenizer: what wrote them; a file doesn't say.

    Returns:
        A store. Its fingerprint covers the sizes and a sample of the content; documents and the validation split's
        bytes are found by reading the whole file, once, when asked for.

    Raises:
        UserError: a file is missing, isn't whole uint16s, or holds an id that the tokenizer doesn't have.
    """
    if tokenizer.vocab_size > 1 << 16:
        raise UserError(
            f"tokenizer.kind = {tokenizer.kind!r}: its {tokenizer.vocab_size:,} ids don't fit a nanoGPT .bin (uint16); "
            "name the tokenizer that wrote the file, such as tiktoken:gpt2"
        )
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=32)
    splits = {}
    for name, path in zip(SPLITS, (Path(train_bin), Path(validation_bin)), strict=True):
        if not path.is_file():
            raise UserError(f"data.{name} = {str(path)!r}: no such file; give the path of a nanoGPT .bin")
        size = path.stat().st_size
        if size % 2:
            raise UserError(f"{path}: {size:,} bytes aren't whole uint16 ids; not a nanoGPT .bin, or cut short")
        token_bytes = tokenizer.token_bytes() if name == "validation" else None
        tokens = _map(path, np.dtype("<u2"), size // 2)
        splits[name] = Split(name, [tokens], tokenizer.end_of_text, token_bytes=token_bytes)
        digest.update(f"{name} {size} ".encode())
        digest.update(_sample(path, tokens, tokenizer))
    manifest = {
        "format": FORMAT_VERSION,
        "fingerprint": digest.hexdigest(),
        "tokenizer": describe_tokenizer(tokenizer),
        "dtype": "uint16",
        "made_from": {"source": {"name": str(train_bin)}, "validation": {"name": str(validation_bin)}},
        "splits": {name: {"tokens": split.token_count} for name, split in splits.items()},
    }
    return Store(Path(train_bin), manifest, splits, tokenizer)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of a tokenizer."""
    names = ("kind", "vocab_size", "end_of_text", "fingerprint")
    return {name: getattr(tokenizer, name) for name in names}


def _sample(path: Path, tokens: np.ndarray, tokenizer: Tokenizer) -> bytes:
    digest = hashlib.blake2b()
    for start in np.linspace(0, max(0, len(tokens) - SAMPLE_TOKENS), SAMPLES).astype(np.int64):
        part = tokens[start : start + SAMPLE_TOKENS]
        digest.update(part.data)
        if len(part) and part.max() >= tokenizer.vocab_size:
            raise UserError(
                f"{path}: holds the id {part.max()}, and {tokenizer.kind} has {tokenizer.vocab_size:,}; set "
                "tokenizer.kind to the tokenizer that wrote it (a nanoGPT .bin is bare uint16 ids, no header)"
            )
    return digest.digest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: not a token store: no manifest.json in it; `meshwright prepare` makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'manifest.json'}: can't be read ({error}); prepare the store anew") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise UserError(
            f"{path}: a store of format {found}, and this Meshwright reads {FORMAT_VERSION}; prepare the store anew"
        )
    if manifest.get("complete") is not True:
        raise UserError(f"{path}: the store is incomplete (its making was cut short); remove it and prepare it anew")
    return manifest


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.is_file():
        raise UserError(f"{path}: missing, though the store's manifest names it; prepare the store anew")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise UserError(f"{path}: {size:,} bytes, and the manifest says {expected:,}; prepare the store anew")
    return np.memmap(path, dtype, "r").view(np.ndarray) if count else np.empty(0, dtype)
