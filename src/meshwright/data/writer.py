"""Writing a token store: shards as they fill, a folder beside the final one, renamed into place when whole."""

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.store import FORMAT_VERSION, SPLITS, describe_tokenizer
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError

SHARD_TOKENS = 64 << 20

# The file that makes a partial folder ours to remove, once the process that it names is dead.
MARKER = "meshwright-partial.json"


class Taken(Exception):
    """Another process put its store where ours was to go."""


class SplitWriter:
    """Appends documents to one split.

    Arguments:
        folder: the store's folder, there already.
        name: `train` or `validation`.
        dtype: uint16 or uint32.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.name = name
        self.tokens = 0
        self.documents = 0
        self._folder = folder
        self._dtype = dtype.newbyteorder("<")
        self._shards: list[dict[str, Any]] = []
        self._file: _HashedFile | None = None
        self._ends = _HashedFile(folder / f"{name}_documents.bin")
        self._bytes = 0

    def append(self, tokens: np.ndarray, document_ends: list[int], text_bytes: int) -> None:
        """Append tokens, of any number of documents or a part of one.

        Arguments:
            tokens: ids `[n]`.
            document_ends: how many of these tokens lie before each end of a document among them.
            text_bytes: the UTF-8 bytes that the tokens stand for.
        """
        self._ends.write(np.array(document_ends, "<u8") + np.uint64(self.tokens))
        self.documents += len(document_ends)
        self._bytes += text_bytes
        while len(tokens):
            part = tokens[: SHARD_TOKENS - self.tokens % SHARD_TOKENS]
            if self._file is None:
                self._file = _HashedFile(self._folder / f"{self.name}_{len(self._shards):05d}.bin")
            self._file.write(part.astype(self._dtype, copy=False))
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self.tokens % SHARD_TOKENS == 0:
                self._close_shard()

    def finish(self) -> dict[str, Any]:
        """Close all files, safe on disk.

        Returns:
            The split's entry in the manifest.
        """
        if self._file is not None:
            self._close_shard()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self._bytes,
            "shards": self._shards,
            "documents_file": self._ends.path.name,
            "documents_blake2b": self._ends.finish(),
        }

    def _close_shard(self) -> None:
        assert self._file is not None
        tokens = self._file.size // self._dtype.itemsize
        self._shards.append({"file": self._file.path.name, "tokens": tokens, "blake2b": self._file.finish()})
        self._file = None


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb")
        self._digest = hashlib.blake2b(digest_size=32)

    def write(self, values: np.ndarray) -> None:
        self._file.write(values.data)
        self._digest.update(values.data)
        self.size += values.nbytes

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()


def write_manifest(
    folder: Path,
    splits: dict[str, dict[str, Any]],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    about: dict[str, Any],
) -> None:
    """Write `manifest.json`, the last file of a store.

    Arguments:
        folder: the store's folder.
        splits: what each `SplitWriter.finish` returned, by name.
        tokenizer: what made the ids; saved beside.
        dtype: of the shards.
        about: what the store was made from, and what was left out.
    """
    tokenizer.save(folder / "tokenizer")
    for path in [*(folder / "tokenizer").iterdir(), folder / "tokenizer"]:
        _sync(path)
    fingerprint = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=32)
    for name in SPLITS:
        fingerprint.update(name.encode())
        for digest in [shard["blake2b"] for shard in splits[name]["shards"]] + [splits[name]["documents_blake2b"]]:
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
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which takes its place when the block ends well and goes away when it doesn't.

    What dead processes of this machine left beside goes away too, if it carries our marker.

    Arguments:
        path: not there, or an empty folder.

    Raises:
        Taken: something took the place meanwhile; it is left as it is.
        UserError: the folder can't be made there, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        partial = _new_partial(path)
    except OSError as error:
        raise UserError(f"{path}: can't make a store there: {error.strerror}; set data.store elsewhere") from None
    try:
        yield partial
        _sync(partial)
        _rename(partial, path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: {error.strerror}; make room, or set data.store to another disk") from None
        raise
    (path / MARKER).unlink()
    _sync(path.parent)


def _rename(partial: Path, path: Path) -> None:
    try:
        os.rename(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Taken(path) from None
        raise


def _new_partial(path: Path) -> Path:
    number = 0
    while True:
        # A process id may be taken: containers that share a disk all count from 1.
        suffix = f"-{number}" if number else ""
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}{suffix}")
        try:
            partial.mkdir()
        except FileExistsError:
            number += 1
            continue
        marker = {"process": os.getpid(), "host": socket.gethostname()}
        (partial / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        return partial


def _sweep(path: Path) -> None:
    for partial in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        try:
            marker = json.loads((partial / MARKER).read_text(encoding="utf-8"))
            dead = marker["host"] == socket.gethostname() and not _alive(marker["process"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if dead:
            shutil.rmtree(partial, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
