"""Object stores: run directories named `s3://bucket/path` or `gs://bucket/path`, over fsspec."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import UserError

_EXTRAS = {"s3": "s3", "gs": "gcs"}
_TRIES, _FIRST_PAUSE = 9, 0.5  # seconds, twice as many each time: two minutes in all
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError)

Result = TypeVar("Result")


def is_remote(run_dir: str | Path) -> bool:
    """Whether a run directory lies on an object store.

    Raises:
        UserError: it names a store that can't be used.
    """
    scheme, sign, rest = str(run_dir).partition("://")
    if not sign:
        return False
    if scheme not in _EXTRAS or not rest.partition("/")[0]:
        raise UserError(f"run_dir = {str(run_dir)!r}: must be a folder, s3://bucket/path or gs://bucket/path")
    return True


def copy_of(url: str) -> Path:
    """This machine's working copy of a run directory that lies on an object store."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2])
    return home / "meshwright" / "runs" / f"{name}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"


class Store:
    """The objects below a URL, by the rest of their names. What fails for a while is tried again.

    Arguments:
        url: as `is_remote` knows it.

    Raises:
        UserError: the library for it isn't installed, or the store can't be reached or read.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            import fsspec

            # What it remembers of listings is wrong as soon as another machine writes.
            self._files: Any = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
        except ImportError:
            extra = _EXTRAS[scheme]
            raise UserError(
                f"run_dir = {url!r}: needs the extra {extra!r}; install it: pip install 'meshwright[{extra}]'"
            ) from None
        self._root = self._files._strip_protocol(self.url)
        try:
            if not self._files.find(self._root) and not self._files.exists(self._root.partition("/")[0]):
                raise FileNotFoundError("there is no such bucket")
        except Exception as error:
            raise UserError(
                f"run_dir = {url!r}: can't be read ({first_line(error)}); see that the bucket is there and that the "
                "environment has its credentials"
            ) from None

    def read(self, name: str) -> bytes | None:
        """The content of an object; None: there is none such."""
        try:
            return self._tried(lambda: self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Make or replace an object, at one moment."""
        self._tried(lambda: self._files.pipe_file(self._path(name), content))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Make or replace objects from files, by the names of the objects."""
        names = list(files)
        for some in _in_lots(names):
            there, here = [self._path(name) for name in some], [str(files[name]) for name in some]
            self._tried(lambda here=here, there=there: self._files.put(here, there))  # type: ignore[misc]

    def download(self, files: Mapping[str, Path]) -> None:
        """Write objects into files whose folders are there, by the names of the objects."""
        for some in _in_lots(list(files)):
            there, here = [self._path(name) for name in some], [str(files[name]) for name in some]
            self._tried(lambda here=here, there=there: self._files.get(there, here))  # type: ignore[misc]

    def names(self, below: str = "") -> list[str]:
        """The names of all objects whose names begin with those folders; in order."""
        start = f"{self._root}/"
        found = self._tried(lambda: self._files.find(self._path(below) if below else self._root))
        return sorted(path.removeprefix(start) for path in found if path.startswith(start))

    def age(self, name: str) -> float | None:
        """Seconds since an object was written, by the clocks of the store and of this machine; None: there is none."""
        try:
            return time.time() - self._tried(lambda: self._files.modified(self._path(name))).timestamp()
        except FileNotFoundError:
            return None

    def copy(self, name: str, to: str) -> None:
        """Copy an object within the store."""
        self._tried(lambda: self._files.cp_file(self._path(name), self._path(to)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, as far as they are there."""
        for name in names:
            try:
                self._tried(lambda name=name: self._files.rm_file(self._path(name)))  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, call: Callable[[], Result]) -> Result:
        for left in reversed(range(_TRIES)):
            try:
                return call()
            except _FINAL:
                raise
            except Exception:  # each library has its own for what may pass
                if not left:
                    raise
                time.sleep(_FIRST_PAUSE * 2 ** (_TRIES - 1 - left))
        raise AssertionError


def _in_lots(names: list[str], size: int = 64) -> Iterable[list[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
