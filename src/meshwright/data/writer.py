"""Writing a token store: shards as they fill, in steps that a crash can't undo."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.store import FORMAT_VERSION, SPLITS, describe_tokenizer
from meshwright.data.tokenizer import Tokenizer
from meshwright.files import replace_text, sync

SHARD_TOKENS = 64 << 20

# Bytes read at once where a file's hash is taken up again.
READ_BYTES = 1 << 20


class Damaged(Exception):
    """Files of a partial store aren't as its state says."""


class SplitWriter:
    """Appends documents to one split.

    Arguments:
        folder: the store's folder, there already.
        name: `train` or `validation`.
        dtype: uint16 or uint32.
        weighted: whether every token has a weight.
        state: what `commit` returned last, to go on from there; what was written after it is cut off.

    Raises:
        Damaged: a file lacks some of what was committed.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, weighted: bool = False, state: dict[str, Any] | None = None
    ) -> None:
        state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
        self.name = name
        self.tokens: int = state["tokens"]
        self.documents: int = state["documents"]
        self._folder = folder
        self._dtype = dtype.newbyteorder("<")
        self._weighted = weighted
        self._bytes: int = state["bytes"]
        self._shards: list[dict[str, Any]] = list(state["shards"])
        self._ends = _HashedFile(folder / f"{name}_documents.bin", 8 * self.documents)
        self._ids: _HashedFile | None = None
        self._weights: _HashedFile | None = None
        if in_shard := self.tokens % SHARD_TOKENS:
            self._open_shard(in_shard)

    @property
    def shard_count(self) -> int:
        """Shards that are whole."""
        return len(self._shards)

    def append(
        self,
        tokens: np.ndarray,
        document_ends: np.ndarray | list[int],
        text_bytes: int,
        weights: np.ndarray | None = None,
    ) -> None:
        """Append tokens, of any number of documents or a part of one.

        Arguments:
            tokens: ids `[n]`.
            document_ends: how many of these tokens lie before each end of a document among them.
            text_bytes: the UTF-8 bytes that the tokens stand for.
            weights: `[n]`, 1 for a token that is to be learned, else 0; None: all are.
        """
        self._ends.write(np.asarray(document_ends, "<u8") + np.uint64(self.tokens))
        self.documents += len(document_ends)
        self._bytes += text_bytes
        if self._weighted and weights is None:
            weights = np.ones(len(tokens), np.uint8)
        start = 0
        while start < len(tokens):
            end = min(len(tokens), start + SHARD_TOKENS - self.tokens % SHARD_TOKENS)
            if self._ids is None:
                self._open_shard()
            assert self._ids is not None
            self._ids.write(np.ascontiguousarray(tokens[start:end], self._dtype))
            if self._weights is not None and weights is not None:
                self._weights.write(np.ascontiguousarray(weights[start:end], np.uint8))
            self.tokens += end - start
            start = end
            if self.tokens % SHARD_TOKENS == 0:
                self._close_shard()

    def commit(self) -> dict[str, Any]:
        """Have all so far safe on disk.

        Returns:
            The state to go on from.
        """
        for file in (self._ends, self._ids, self._weights):
            if file is not None:
                file.sync()
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self._bytes, "shards": self._shards}

    def finish(self) -> dict[str, Any]:
        """Close all files, safe on disk.

        Returns:
            The split's entry in the manifest.
        """
        if self._ids is not None:
            self._close_shard()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self._bytes,
            "shards": self._shards,
            "documents_file": self._ends.path.name,
            "documents_blake2b": self._ends.finish(),
        }

    def close(self) -> None:
        """Close all files as they are."""
        for file in (self._ends, self._ids, self._weights):
            if file is not None:
                file.close()

    def _open_shard(self, tokens: int = 0) -> None:
        path = self._folder / f"{self.name}_{len(self._shards):05d}.bin"
        self._ids = _HashedFile(path, tokens * self._dtype.itemsize)
        self._weights = _HashedFile(path.with_suffix(".weights"), tokens) if self._weighted else None

    def _close_shard(self) -> None:
        assert self._ids is not None
        tokens = self._ids.size // self._dtype.itemsize
        shard = {"file": self._ids.path.name, "tokens": tokens, "blake2b": self._ids.finish()}
        if self._weights is not None:
            shard |= {"weights": self._weights.path.name, "weights_blake2b": self._weights.finish()}
        self._shards.append(shard)
        self._ids = self._weights = None


class _HashedFile:
    """Written from `size` on: what lies before is hashed again, what lies behind is cut off."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._digest = hashlib.blake2b(digest_size=32)
        if size and not (path.is_file() and path.stat().st_size >= size):
            raise Damaged(path)
        self._file = path.open("r+b" if size else "w+b")
        self._file.truncate(size)
        while data := self._file.read(READ_BYTES):
            self._digest.update(data)

    def write(self, values: np.ndarray) -> None:
        self._file.write(values.data)
        self._digest.update(values.data)
        self.size += values.nbytes

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> str:
        self.sync()
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> Path:
    """Save a store's tokenizer, safe on disk.

    Returns:
        Its folder.
    """
    saved = folder / "tokenizer"
    tokenizer.save(saved)
    for path in [*saved.iterdir(), saved, folder]:
        sync(path)
    return saved


def write_manifest(
    folder: Path,
    splits: dict[str, dict[str, Any]],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    about: dict[str, Any],
) -> None:
    """Write `manifest.json`, the last file of a store; its tokenizer is saved there already.

    Arguments:
        folder: the store's folder.
        splits: what each `SplitWriter.finish` returned, by name.
        tokenizer: what made the ids.
        dtype: of the shards.
        about: what the store was made from, and what was left out.
    """
    fingerprint = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=32)
    for name in SPLITS:
        fingerprint.update(name.encode())
        shards = splits[name]["shards"]
        digests = [shard["blake2b"] for shard in shards] + [splits[name]["documents_blake2b"]]
        for digest in digests + [shard["weights_blake2b"] for shard in shards if "weights" in shard]:
            fingerprint.update(digest.encode())
    manifest = {
        "format": FORMAT_VERSION,
        "fingerprint": fingerprint.hexdigest(),
        "tokenizer": describe_tokenizer(tokenizer),
        "dtype": dtype.name,
        **about,
        "splits": splits,
        "complete": True,
    }
    replace_text(folder / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
