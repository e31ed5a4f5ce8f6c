"""Where text comes from: Python's own source, a file, a glob, a folder; as a stream of documents."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshwright.errors import UserError

CHUNK_BYTES = 1 << 20

# Tests of the library, and what others installed into it.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """One document, or word of one that can't be used."""

    name: str
    """Where it came from: a path, and for a part of a file `#` and its number."""
    text: str
    fault: str = ""
    """Why it can't be used (`text` is then empty): it is left out and counted."""


class Source(Protocol):
    """A corpus. Iterating it twice must give the same documents in the same order."""

    def describe(self) -> dict[str, Any]:
        """What the corpus is, without reading it.

        Returns:
            `name`, for people; `fingerprint`, which changes when the documents do; and, where known, `bytes`, the
            total size of the text.
        """

    def documents(self) -> Iterator[Document]:
        """Every document, in order; holds one at a time."""


@dataclass(frozen=True)
class Files:
    """The documents of a list of files.

    A file is one document, its bytes kept as they are; with a separator, each part between two separators is one. What
    isn't UTF-8 comes out as a document with a fault.
    """

    name: str
    root: Path
    """The folder that document names are relative to."""
    paths: tuple[str, ...]
    """POSIX paths below the root, sorted."""
    separator: str = ""

    def describe(self) -> dict[str, Any]:
        listing = hashlib.sha256()
        total = 0
        for path in self.paths:
            stat = (self.root / path).stat()
            listing.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
            total += stat.st_size
        return {"name": self.name, "fingerprint": listing.hexdigest(), "files": len(self.paths), "bytes": total}

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            try:
                if self.separator:
                    parts = _split_file(self.root / path, self.separator.encode())
                    yield from (_decode(f"{path}#{number}", part) for number, part in enumerate(parts))
                else:
                    yield _decode(path, (self.root / path).read_bytes())
            except OSError as error:
                raise UserError(f"{self.root / path}: can't be read: {error.strerror}") from None


def open_source(spec: str, separator: str = "", key: str = "data.train") -> Files:
    """Open what a run file names as a source.

    Arguments:
        spec: `python-stdlib`, a file, a folder (all files below it, hidden ones aside), or a glob (`**` recurses).
        separator: text between two documents of one file; empty: one file is one document.
        key: the run file's key, for error messages.

    Raises:
        UserError: there is no such file, or nothing matches.
    """
    path = Path(spec).expanduser()
    if spec == "python-stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in _below(root, STDLIB_SKIPPED) if path.suffix == ".py"]
    elif path.is_file():
        paths = [path]
    elif spec and path.is_dir():
        paths = _below(path, set())
        if not paths:
            raise UserError(f"{key} = {spec!r}: the folder holds no files (hidden ones don't count); put text there")
    elif any(sign in spec for sign in "*?["):
        paths = [match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file()]
        if not paths:
            raise UserError(f"{key} = {spec!r}: matches no file; check the pattern and the working directory")
    else:
        raise UserError(
            f"{key} = {spec!r}: no such file or folder; give a text file, a folder, a glob or python-stdlib"
        )
    # Relative to what the files share, so that a corpus that moves as a whole stays the same corpus.
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    names = sorted({path.absolute().relative_to(root).as_posix() for path in paths})
    return Files(spec, root, tuple(names), separator)


def _below(root: Path, skipped: set[str]) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _decode(name: str, data: bytes) -> Document:
    try:
        return Document(name, data.decode())
    except UnicodeDecodeError as error:
        return Document(name, "", fault=f"not UTF-8 (byte {error.start})")


def _split_file(path: Path, separator: bytes) -> Iterator[bytes]:
    buffer = bytearray()
    searched = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            buffer += chunk
            start = 0
            while (end := buffer.find(separator, max(start, searched))) >= 0:
                yield bytes(buffer[start:end])
                start = end + len(separator)
            del buffer[:start]
            # A separator may lie across two chunks; all before its longest possible beginning is searched for good.
            searched = max(0, len(buffer) - len(separator) + 1)
    yield bytes(buffer)
