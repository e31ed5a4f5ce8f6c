"""A run directory on an object store, and this machine's working copy of it.

Everything is written into the copy first, as into any run directory. Each checkpoint is uploaded, by each process what
it wrote, then the small files, and last the manifest, without which a checkpoint doesn't exist; so a crash at any
moment leaves a whole checkpoint in the store, with the records that lead up to it. What counts is the store: at each
start the copy is made to agree with it. Machines need to share nothing else.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.checkpoints import MANIFEST, facts_of, is_as_written
from meshwright.errors import UserError
from meshwright.launch.group import ALONE, Group
from meshwright.launch.shared_storage import SHARED, check_same_store
from meshwright.rundir import HEADER
from meshwright.storage.lease import Lease
from meshwright.storage.store import Store, copy_of, is_remote

_CHECKPOINTS, _TRAINING, _RUN_FILE = "checkpoints", ".training", "run.toml"
_STEP = re.compile(r"step_\d{8,}")
_OF_THE_COPY = re.compile(
    rf"^workers/compiled/|^{re.escape(SHARED)}/|(^|/)\.(lock|fetching|training|lease\.json)$|\.(partial|new|fetched)$"
)
_SECONDS = 24 * 3600.0  # for all to upload; one that dies is noticed long before


def mirror_of(run_dir: str, group: Group, note: Callable[[str], None]) -> "Mirror | None":
    """The mirror of a run that is about to train; None: its run directory is a folder.

    Arguments:
        run_dir: as in the run file.
        group: the processes that train together, each calling this.
        note: told of what a person should know.

    Raises:
        UserError: the store can't be used, or another process trains there.
    """
    return Mirror(run_dir, group, note) if is_remote(run_dir) else None


def local_run(path: str | Path) -> Path:
    """The folder to read a run from: the path itself, or this machine's copy of what is on an object store, up to date
    but for the checkpoints' files.

    Raises:
        UserError: the store can't be read.
    """
    if not is_remote(path):
        return Path(path)
    reader = Reader(str(path))
    with reader.alone():
        if not reader.is_trained_in():  # then it is newer than the store
            reader.fetch_small_files()
            reader.fetch_manifests()
    return reader.copy


class Reader:
    """What of a run directory on an object store lies in this machine's copy.

    Arguments:
        url: of the run directory.
    """

    def __init__(self, url: str):
        self.store = Store(url)
        self.copy = copy_of(url)
        self.copy.mkdir(parents=True, exist_ok=True)

    def fetch_small_files(self, *, logs: bool = True) -> None:
        """Have all files but the checkpoints' as they are in the store.

        One that begins as the store's does, but is longer, was gone on with here and stays.

        Arguments:
            logs: whether those of the workers, too.
        """
        for name in self.store.names():
            if name.startswith(f"{_CHECKPOINTS}/") or _OF_THE_COPY.search(name):
                continue
            if name.startswith("workers/") and not logs:
                continue
            content, path = self.store.read(name), self.copy / name
            if content is None or (path.is_file() and path.read_bytes().startswith(content)):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, content)

    def fetch_manifests(self) -> None:
        """Have the manifests of all checkpoints in the store, and no folder of a checkpoint that isn't there."""
        there = {name.split("/")[1]: name for name in self._committed()}
        folder = self.copy / _CHECKPOINTS
        for path in folder.glob("step_*"):
            content = self.store.read(there[path.name]) if path.name in there else None
            manifest = path / MANIFEST
            if content is None or not manifest.is_file() or manifest.read_bytes() != content:
                shutil.rmtree(path)  # of an upload that was never whole, or of another run of the same name
        for step, name in there.items():
            if not (folder / step).exists() and (content := self.store.read(name)):
                (folder / step).mkdir(parents=True)
                _replace(folder / step / MANIFEST, content)

    def fetch(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Have the files of a checkpoint; those that are whole here aren't read again.

        Arguments:
            folder: of the checkpoint, in the copy.
            manifest: the checkpoint's.
        """
        with self.alone():
            missing = [name for name, facts in manifest["files"].items() if not is_as_written(folder / name, facts)]
            for name in missing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            there = set(self.store.names(f"{_CHECKPOINTS}/{folder.name}")) if missing else set()
            wanted = {f"{_CHECKPOINTS}/{folder.name}/{name}": folder / name for name in missing}
            beside = {name: path.with_name(f"{path.name}.fetched") for name, path in wanted.items() if name in there}
            self.store.download(beside)
            for name, path in beside.items():
                os.replace(path, wanted[name])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process of this machine fetches, and keep others from it meanwhile."""
        with open(self.copy / ".fetching", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_trained_in(self) -> bool:
        """Whether a run trains in this copy; while `alone`, none starts to."""
        with open(self.copy / _TRAINING, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def _committed(self) -> list[str]:
        names = (name for name in self.store.names(_CHECKPOINTS) if name.count("/") == 2)
        return [name for name in names if name.endswith(f"/{MANIFEST}") and _STEP.fullmatch(name.split("/")[1])]


class Mirror(Reader):
    """Keeps the store as the copy is, while a run trains.

    Arguments:
        url: of the run directory.
        group: the processes that train together, each making this at the same time.
        note: told of what a person should know.

    Raises:
        UserError: the store can't be used or isn't one for all of the group, another process trains there, or it holds
            a `run.toml` of the user's.
    """

    def __init__(self, url: str, group: Group = ALONE, note: Callable[[str], None] = lambda _: None):
        super().__init__(url)
        self._group = group
        self._log = f"workers/worker_{group.rank}.log"
        self._pushed: dict[str, tuple[int, int]] = {}
        self._training = open(self.copy / _TRAINING, "w")  # noqa: SIM115  (closed in __exit__)
        self._lease: Lease | None = None
        try:
            with self.alone():
                fcntl.flock(self._training, fcntl.LOCK_SH)
                if group.is_primary:
                    self._take_over(note)
                self._go_on_with_log()
            group.barrier("store swept", _SECONDS)
            check_same_store(self.store, group)
            with self.alone():
                self.fetch_manifests()
            group.barrier("store read", _SECONDS)
        except BaseException:
            self._let_go()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._check()
            self._push_small_files()
        except Exception:
            if kind is None:
                raise
        finally:
            self._let_go()

    def partial(self, name: str) -> Path:
        """The folder, in the copy, into which this process writes its part of a checkpoint."""
        part = "" if self._group.is_primary else f".{self._group.rank}"
        return self.copy / _CHECKPOINTS / f"{name}{part}.partial"

    def upload(self, partial: Path, name: str) -> dict[str, dict[str, Any]]:
        """Upload what this process has written of a checkpoint; returns when all have.

        Arguments:
            partial: the folder with it.
            name: of the checkpoint's folder.

        Returns:
            The facts of all files, in the first process; in the others those of the files it uploaded.

        Raises:
            UserError: another process has taken the run directory over, or what one has uploaded isn't there.
        """
        self._check()
        folder, group = f"{_CHECKPOINTS}/{name}", self._group
        files = facts_of(partial)
        if group.is_primary:
            self.store.write(f"{folder}/parts/0.json", json.dumps(list(files)).encode())
        group.barrier("checkpoint listed", _SECONDS)
        if not group.is_primary:  # what both have written, such as the names of the arrays, is the first one's
            theirs = set(self._part(folder, 0))
            files = {file: facts for file, facts in files.items() if file not in theirs}
        self.store.upload({f"{folder}/{file}": partial / file for file in files})
        if not group.is_primary:
            self.store.write(f"{folder}/parts/{group.rank}.json", json.dumps(files).encode())
            self._push_small_files()
        group.barrier("checkpoint uploaded", _SECONDS)
        if group.is_primary:
            for rank in range(1, group.size):
                files |= self._part(folder, rank)
            self.store.remove([f"{folder}/parts/{rank}.json" for rank in range(group.size)])
        return files

    def _part(self, folder: str, rank: int) -> Any:
        content = self.store.read(name := f"{folder}/parts/{rank}.json")
        if content is None:
            raise UserError(
                f"{self.store.url}/{name}: was written by worker {rank}, and isn't there; the checkpoint isn't "
                "committed; see that all workers reach the same store, and that nothing else removes objects from it"
            )
        return json.loads(content)

    def publish(self, name: str, manifest: Path) -> None:
        """Commit a checkpoint that was uploaded, after the small files as they are now.

        Raises:
            UserError: another process has taken the run directory over.
        """
        self._check()
        self._push_small_files()
        self._check()
        self.store.write(f"{_CHECKPOINTS}/{name}/{MANIFEST}", manifest.read_bytes())

    def remove(self, name: str) -> None:
        """Remove a checkpoint from the store.

        Raises:
            UserError: another process has taken the run directory over.
        """
        self._check()
        folder = f"{_CHECKPOINTS}/{name}"
        self.store.remove([f"{folder}/{MANIFEST}"])  # first, so that half a folder is never taken for a whole one
        self.store.remove(self.store.names(folder))

    def set_aside(self, name: str) -> None:
        """Give a damaged checkpoint in the store another name."""
        names, taken = self.store.names(_CHECKPOINTS), 1
        while any(one.startswith(f"{_CHECKPOINTS}/{name}.damaged-{taken}/") for one in names):
            taken += 1
        folder = f"{_CHECKPOINTS}/{name}/"
        for one in names:
            if one.startswith(folder):
                self.store.copy(one, f"{_CHECKPOINTS}/{name}.damaged-{taken}/{one.removeprefix(folder)}")
        self.remove(name)

    def _take_over(self, note: Callable[[str], None]) -> None:
        content = self.store.read(_RUN_FILE)
        ours = content is not None and content.startswith(HEADER.encode())
        if content is not None and not ours:
            raise UserError(
                f"run_dir = {self.store.url!r}: its {_RUN_FILE} would be overwritten by the resolved run file; set "
                "run_dir to a place of its own"
            )
        self._lease = Lease(self.store, note)
        note(f"{self.store.url} is worked on in {self.copy}")
        self.fetch_small_files(logs=False)
        self._sweep(in_store=ours)

    def _check(self) -> None:
        if self._lease:
            self._lease.check()

    def _let_go(self) -> None:
        if self._lease:
            self._lease.close()
        self._training.close()

    def _go_on_with_log(self) -> None:
        # It is being written to already, so what is in the store comes before it in the same file.
        content, path = self.store.read(self._log), self.copy / self._log
        if content and path.is_file() and not (words := path.read_bytes()).startswith(content):
            with path.open("r+b") as file:
                file.write(content + _beyond(content, words))

    def _sweep(self, *, in_store: bool) -> None:
        for partial in (self.copy / _CHECKPOINTS).glob("step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        if not in_store:
            return
        names = self.store.names(_CHECKPOINTS)
        committed = {name.split("/")[1] for name in self._committed()}
        steps = {name: name.split("/")[1] for name in names if name.count("/") >= 2}
        self.store.remove(name for name, step in steps.items() if _STEP.fullmatch(step) and step not in committed)

    def _push_small_files(self) -> None:
        changed: dict[str, tuple[Path, tuple[int, int]]] = {}
        beside = (path for path in self.copy.iterdir() if path.name != _CHECKPOINTS)
        for path in sorted(file for one in beside for file in (one, *one.rglob("*")) if file.is_file()):
            name = path.relative_to(self.copy).as_posix()
            if _OF_THE_COPY.search(name):
                continue
            # Another worker uploads its log itself; what is here of it may be of a time when it was on this machine.
            if name != self._log and (name.startswith("workers/") or not self._group.is_primary):
                continue
            facts = path.stat()
            if self._pushed.get(name) != (version := (facts.st_mtime_ns, facts.st_size)):
                changed[name] = path, version
        for name, (path, version) in changed.items():
            self.store.write(name, path.read_bytes())
            self._pushed[name] = version


def _beyond(earlier: bytes, log: bytes) -> bytes:
    """The lines of a log but for those that it has from another one, which was gone on with elsewhere."""
    lines = log.splitlines(keepends=True)
    common = takewhile(lambda pair: pair[0] == pair[1], zip(earlier.splitlines(keepends=True), lines, strict=False))
    return b"".join(lines[len(list(common)) :])


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f"{path.name}.fetched")
    beside.write_bytes(content)
    os.replace(beside, path)
