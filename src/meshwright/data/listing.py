"""Which files a source has: on this machine, or at an address through fsspec."""

import fnmatch
import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from meshwright.data.optional import optional
from meshwright.data.partial import MARKER
from meshwright.errors import UserError
from meshwright.files import is_run_directory


class State(NamedTuple):
    """What tells whether a file has changed."""

    size: int
    """Bytes."""
    version: str
    """A time or a hash, as the file system gives it."""


class Folder(Protocol):
    """Where the files of a source lie; paths are POSIX and below it."""

    def state(self, path: str) -> State:
        """The state of a file."""

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    def where(self, path: str) -> str:
        """The file's full name, for messages."""


class Listing(NamedTuple):
    """The files that a spec names."""

    folder: Folder
    """What they share, so that a corpus that moves as a whole stays the same corpus."""
    paths: tuple[str, ...]
    """Sorted."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine."""

    root: Path

    def state(self, path: str) -> State:
        stat = (self.root / path).stat()
        return State(stat.st_size, str(stat.st_mtime_ns))

    def open(self, path: str) -> BinaryIO:
        return (self.root / path).open("rb")

    def where(self, path: str) -> str:
        return str(self.root / path)


@dataclass(frozen=True)
class RemoteFolder:
    """A folder, or a prefix, of an fsspec file system."""

    filesystem: Any
    root: str
    states: dict[str, State]

    def state(self, path: str) -> State:
        return self.states[path]

    def open(self, path: str) -> BinaryIO:
        return self.filesystem.open(self._full(path), "rb")

    def where(self, path: str) -> str:
        return self.filesystem.unstrip_protocol(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root else path


def matcher(patterns: list[str]) -> Callable[[str], bool]:
    """Whether a path, or its last part, matches one of the globs.

    `*` stands for anything, `/` too, and `**/` for any number of folders, none too: `**/*.rs` is every `.rs` file.

    Arguments:
        patterns: as in a run file.
    """
    inner = [
        "(?:.*/)?".join(fnmatch.translate(part)[4:-3] for part in pattern.split("**/"))
        for pattern in (pattern + "*" if pattern.endswith("/") else pattern for pattern in patterns)
    ]
    expression = re.compile(f"(?s:{'|'.join(f'(?:{one})' for one in inner)})\\Z")
    return lambda path: bool(expression.match(path) or expression.match(posixpath.basename(path)))


def below(root: Path, skipped: Iterable[str] = ()) -> list[Path]:
    """All files below a folder, hidden ones, what lies in skipped folders, and run directories and stores aside."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        folders[:] = [name for name in folders if not _is_output(Path(folder, name))]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def list_local(spec: str, key: str, kept: Callable[[str], bool]) -> Listing:
    """The files of this machine that a spec names.

    Arguments:
        spec: a file, a folder (all files below it, hidden ones aside), or a glob (`**` recurses). Run directories and
            stores below them are passed over: what a run writes would change what it is trained on.
        key: the run file's key, for error messages.
        kept: says of a path below the folder, or below the glob's fixed part, whether it counts.

    Raises:
        UserError: there is no such file, or nothing matches.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        paths, top = [path], path.parent
    elif spec and path.is_dir():
        paths, top = below(path), path
        if not paths:
            raise UserError(f"{key} = {spec!r}: the folder holds no files (hidden ones don't count); put text there")
    elif any(sign in spec for sign in "*?["):
        matches = [match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file()]
        top = Path(_fixed_part(str(path)))
        paths = _without_outputs(matches, top)
        if not paths:
            but = " but those of runs and stores, which are no text to train on" if matches else ""
            raise UserError(f"{key} = {spec!r}: matches no file{but}; check the pattern and the working directory")
    else:
        raise UserError(
            f"{key} = {spec!r}: no such file or folder; give a text file, a folder, a glob or python-stdlib"
        )
    return local_listing(paths, top, kept)


def _is_output(folder: Path) -> bool:
    made = (folder / "train_documents.bin").is_file() and (folder / "manifest.json").is_file()
    return made or (folder / MARKER).is_file() or is_run_directory(folder)


def _without_outputs(paths: list[Path], top: Path) -> list[Path]:
    known = {top: False}

    def lies_in_output(folder: Path) -> bool:
        if folder not in known:
            above = folder != folder.parent and lies_in_output(folder.parent)
            known[folder] = above or _is_output(folder)
        return known[folder]

    return [path for path in paths if not lies_in_output(path.parent)]


def local_listing(paths: list[Path], top: Path, kept: Callable[[str], bool]) -> Listing:
    """A listing of files below `top`, of which `kept` chooses."""
    root, names = _names([path.absolute().as_posix() for path in paths], top.absolute().as_posix(), kept)
    return Listing(LocalFolder(Path(root or "/")), names)


def list_remote(spec: str, key: str, kept: Callable[[str], bool]) -> Listing:
    """The files at an address.

    Arguments:
        spec: a file, a folder or prefix, or a glob, such as `s3://bucket/texts/*.jsonl.zst`.
        key: the run file's key, for error messages.
        kept: as for `list_local`.

    Raises:
        UserError: no library for such addresses, no access, or nothing there.
    """
    fsspec = optional("fsspec.core", f"{key} = {spec!r}")
    try:
        filesystem, path = fsspec.url_to_fs(spec)
        found, top = _find(filesystem, path.rstrip("/"))
    except Exception as error:  # each file system raises what its library does
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{key} = {spec!r}: can't be opened: {why[0]}") from None
    if not found:
        raise UserError(f"{key} = {spec!r}: nothing there; check the address")
    root, names = _names(list(found), top, kept)
    states = {name: _state(found[f"{root}/{name}" if root else name]) for name in names}
    return Listing(RemoteFolder(filesystem, root, states), names)


def _find(filesystem: Any, path: str) -> tuple[dict[str, dict], str]:
    if filesystem.isfile(path):
        return {path: filesystem.info(path)}, posixpath.dirname(path)
    if any(sign in path for sign in "*?["):
        found, top = filesystem.glob(path, detail=True), _fixed_part(path)
    else:
        found, top = filesystem.find(path, detail=True), path
    files = {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}
    return {name: info for name, info in files.items() if "/." not in name.removeprefix(top)}, top


def _state(info: dict[str, Any]) -> State:
    # The names by which the file systems call a content's hash, or the time of its last change.
    names = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
    version = next((str(info[name]) for name in names if info.get(name) is not None), "")
    return State(info["size"] or 0, version)


def _fixed_part(pattern: str) -> str:
    parts = pattern.split("/")
    fixed = next(place for place, part in enumerate(parts) if any(sign in part for sign in "*?["))
    return "/".join(parts[:fixed])


def _names(paths: list[str], top: str, kept: Callable[[str], bool]) -> tuple[str, tuple[str, ...]]:
    folders = [path.split("/")[:-1] for path in paths]
    # The common part of the first and the last in order is common to all.
    first, last = min(folders), max(folders)
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    chosen = {path for path in paths if kept(path.removeprefix(top).lstrip("/"))}
    return "/".join(first[:shared]), tuple(sorted("/".join(path.split("/")[shared:]) for path in chosen))
