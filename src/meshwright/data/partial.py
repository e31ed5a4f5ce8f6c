"""The folder in which a store is made: one process at a time, kept over crashes, renamed into place when whole."""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from meshwright.errors import UserError
from meshwright.files import replace_text, sync

# The file that makes a partial folder ours; the process at work holds a lock on it.
MARKER = "meshwright-partial.json"
STATE = "state.json"
SEEN = "seen.db"

# What lies in a partial folder and not in a store; MARKER goes last.
SCRATCH = (STATE, f"{STATE}.new", SEEN, f"{SEEN}-journal")


class Taken(Exception):
    """Something else came to be where the store was to go."""


class Partial:
    """A partial store that this process alone works on.

    Arguments:
        folder: where it lies.
        made_from: what the store is made from; work on something else is thrown away.
    """

    def __init__(self, folder: Path, made_from: dict[str, Any]) -> None:
        self.folder = folder
        self._identity = identity(made_from)
        manifest, state = _read(folder / "manifest.json"), _read(folder / STATE)
        self.complete = identity(manifest.get("made_from", {})) == self._identity
        """Whether nothing is left to do but to rename it."""
        self.state: dict[str, Any] = state if state.get("identity") == self._identity else {}
        """What was committed last; empty: nothing."""
        if not self.state and not self.complete:
            self.reset()

    def commit(self, state: dict[str, Any]) -> None:
        """Make a state the one to go on from; its files are safe on disk already."""
        sync(self.folder)
        self.state = {**state, "identity": self._identity}
        replace_text(self.folder / STATE, json.dumps(self.state, ensure_ascii=False))

    def reset(self) -> None:
        """Throw all work away."""
        self.state = {}
        for path in self.folder.iterdir():
            if path.name == MARKER:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def drop(self) -> None:
        """Throw the folder away too, as far as that goes."""
        with suppress(OSError):
            self.reset()
            # Whoever waits for the lock sees that its file is gone; whoever comes now may make the folder theirs.
            (self.folder / MARKER).unlink()
            self.folder.rmdir()


@contextmanager
def claim(path: Path, made_from: dict[str, Any], waiting: Callable[[], None]) -> Iterator[Partial | None]:
    """The partial store beside `path`, for this process alone; it takes its place when the block ends well.

    When the block ends badly, what was committed stays, for a later call to go on from.

    Arguments:
        path: where the store is to be; not there, or an empty folder.
        made_from: what it is made from.
        waiting: called once if another process is at work there.

    Returns:
        The partial store; None: the store has come to be there meanwhile.

    Raises:
        Taken: something took the place meanwhile; it is left as it is.
        UserError: the folder can't be made there, isn't one of ours, or the disk is full.
    """
    if path.is_symlink():  # a folder can't be renamed onto a link
        path = Path(os.path.realpath(path))
    folder = path.with_name(f"{path.name}.partial")
    try:
        lock = _locked(path, folder, waiting)
    except OSError as error:
        raise UserError(f"{path}: can't make a store there: {error.strerror}; set data.store elsewhere") from None
    if lock is None:
        yield None
        return
    partial = None
    with lock:
        try:
            partial = Partial(folder, made_from)
            yield partial
            _put_in_place(folder, path)
        except BaseException as error:
            if partial is not None and (not partial.state or isinstance(error, Taken)):
                partial.drop()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"{path}: {error.strerror}; make room and the same command goes on, or set data.store to another "
                    "disk"
                ) from None
            raise
        tidy(path)
        sync(path.parent)


def identity(made_from: dict[str, Any]) -> dict[str, Any]:
    """What of `made_from` must be equal: a source may be called by another name, a tokenizer lie in another folder."""

    def fingerprint(part: Any) -> Any:
        return part.get("fingerprint", part) if isinstance(part, dict) else part

    return {name: fingerprint(part) for name, part in made_from.items()}


def is_free(path: Path) -> bool:
    """Whether a store may be put there: nothing is, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def tidy(path: Path) -> None:
    """Remove what a process that died at the last moment left in a whole store, where we may write there."""
    with suppress(OSError):
        (path / MARKER).unlink(missing_ok=True)


def _locked(path: Path, folder: Path, waiting: Callable[[], None]) -> IO[str] | None:
    waited = False
    while is_free(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if (names := os.listdir(folder)) and MARKER not in names:
                raise UserError(f"{folder}: in the way of the store to be made beside it, and not ours; move it")
            file = (folder / MARKER).open("a", encoding="utf-8")
        except FileNotFoundError:
            continue  # the other process was done just now
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    waiting()
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same(file, folder / MARKER):
                file.truncate(0)
                json.dump({"process": os.getpid(), "host": socket.gethostname()}, file)
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    return None


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _put_in_place(folder: Path, path: Path) -> None:
    for name in SCRATCH:
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    try:
        os.rename(folder, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Taken(path) from None
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
