"""Checkpoints as folders: written beside, then renamed into place with a manifest. The same for every engine.

A folder without its manifest does not exist as far as training is concerned, so a crash at any moment leaves either
the whole checkpoint or none.
"""

import hashlib
import json
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import UserError
from meshwright.files import sync
from meshwright.models.spec import ModelSpec

if TYPE_CHECKING:
    from meshwright.storage.mirror import Mirror, Reader

MANIFEST = "manifest.json"
_SMALL = 64 * 2**20  # bytes up to which a file's content is checked, not its size alone
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One that was written whole."""

    folder: Path
    manifest: dict[str, Any]
    reader: "Reader | None" = None
    """Fetches its files from an object store; None: they are here."""

    @property
    def step(self) -> int:
        """Updates done when it was taken."""
        return self.manifest["step"]

    def fetch(self) -> None:
        """Have its files here."""
        if self.reader:
            self.reader.fetch(self.folder, self.manifest)

    def damage(self) -> str | None:
        """What is wrong with its files; None: they are as they were written."""
        self.fetch()
        for name, facts in self.manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes where the manifest says {facts['bytes']:,}"
            if not is_as_written(path, facts):
                return f"{name} has other content than was written"
        return None


class _Failure(NamedTuple):
    step: int
    partial: Path
    error: BaseException


class Checkpoints:
    """The checkpoints of one run.

    Arguments:
        folder: made if missing.
        keep: how many of the newest stay; the best by validation loss stays besides.
        commits: whether this process commits and removes checkpoints; of several that train together one does, and
            the others only write their part of the state.
        on_committed: told by `wait` of the checkpoint that was under way, in every process.
        on_failed: told, in place of an exception, of one that failed, once the next one is committed; for a process
            that trains alone, as of several the others wait for the one that failed.
        note: told by `wait` of what of older ones could not be removed.
        reader: fetches what is on an object store; a `Mirror` has what is saved there, too.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        commits: bool = True,
        on_committed: Callable[[Checkpoint], None] | None = None,
        on_failed: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
        reader: "Reader | None" = None,
    ):
        self.folder = folder
        self.keep = keep
        self._commits = commits
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._note = note
        self._reader = reader
        self._under_way: Checkpoint | None = None
        self._thread: threading.Thread | None = None
        self._failure: _Failure | None = None
        self._kept: Exception | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Wait until the checkpoint under way is committed, whatever has ended training."""
        with suppress(Exception) if error else nullcontext():  # what came first is what counts
            self.wait()

    def committed(self) -> list[Checkpoint]:
        """Every committed one, oldest first; folders without a readable manifest are passed over."""
        found = []
        for path in self.folder.glob("step_*"):
            if _NAME.fullmatch(path.name) and (manifest := _read_manifest(path / MANIFEST)):
                found.append(Checkpoint(path, manifest, self._reader))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def at(self, step: int) -> Checkpoint:
        """The committed one of a step, with its files.

        Raises:
            UserError: there is none such.
        """
        for checkpoint in self.committed():
            if checkpoint.step == step:
                checkpoint.fetch()
                return checkpoint
        raise UserError(
            f"{self.folder / _name(step)}: isn't here, or its {MANIFEST} can't be read, though another worker has it; "
            "see to it that all workers see the same folder"
        )

    def best(self) -> Checkpoint | None:
        """The one of the lowest validation loss, where any was evaluated."""
        evaluated = (c for c in self.committed() if c.manifest.get("val_loss") is not None)
        return min(evaluated, key=_val_loss, default=None)

    def sound(self, note: Callable[[str], None]) -> Iterator[Checkpoint]:
        """Those whose files are whole, newest first.

        Arguments:
            note: told of each that is passed over, by name, and why.
        """
        for path in sorted(self.folder.glob("step_*"), reverse=True):
            if not _NAME.fullmatch(path.name):
                continue
            manifest = _read_manifest(path / MANIFEST)
            found = Checkpoint(path, manifest, self._reader) if manifest else None
            damage = found.damage() if found else f"{MANIFEST} is missing or unreadable"
            if damage:
                note(f"checkpoint {path} skipped: {damage}")
            elif found:
                yield found

    def sweep(self) -> None:
        """Remove what crashes left of saves and removals; call it while no other run trains here."""
        if not self._commits:
            return
        for partial in self.folder.glob("step_*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside(self, after: int, note: Callable[[str], None]) -> None:
        """Rename those of later steps, which were found damaged: none of them is to count as one of the newest or the
        best, for which others are removed.

        Arguments:
            after: the step that is gone on from.
            note: told of each.
        """
        if not self._commits:
            return
        for path in sorted(self.folder.glob("step_*")):
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) > after:
                if self._mirror:
                    self._mirror.set_aside(path.name)
                kept = _free_name(path)
                path.rename(kept)
                note(f"checkpoint {path} is kept as {kept.name}")

    def save(self, write: Callable[[Path], Callable[[], None]], manifest: dict[str, Any]) -> None:
        """Start a checkpoint; it is committed in the background.

        Arguments:
            write: starts to write the state into an empty folder and returns a function that waits for it
                (`Engine.save`).
            manifest: `step`, `val_loss` (None: not evaluated), and whatever else it should say.

        Raises:
            Exception: what went wrong with the one before, unless `on_failed` is told; then with this one.
        """
        if failure := self._finished():
            if self._on_failed is None:
                raise failure.error
            shutil.rmtree(failure.partial, ignore_errors=True)  # it takes room
        name = _name(manifest["step"])
        partial, mirror = self._partial(name), self._mirror
        if mirror or self._commits:
            partial.mkdir(parents=True)
        finish = write(partial)

        def commit() -> None:
            try:
                finish()
                uploaded = mirror.upload(partial, name) if mirror else None
                if self._commits:
                    _commit(partial, self.folder / name, manifest, mirror, uploaded)
                    try:
                        self._prune()
                    except Exception as error:  # it is saved, and the next save tries again
                        self._kept = error
                elif mirror:
                    shutil.rmtree(partial)
            except BaseException as error:
                self._failure = _Failure(manifest["step"], partial, error)

        self._under_way = Checkpoint(self.folder / name, manifest)
        self._thread = threading.Thread(target=commit, name="checkpoint")
        self._thread.start()
        if failure and self._on_failed:
            self.wait()
            self._on_failed(
                f"the checkpoint of step {failure.step} could not be saved ({failure.error}); that of step "
                f"{manifest['step']} is"
            )

    def wait(self) -> None:
        """Wait until the checkpoint under way is committed.

        Raises:
            Exception: what went wrong with it.
        """
        if failure := self._finished():
            raise failure.error

    def _finished(self) -> _Failure | None:
        """Wait for the checkpoint under way; None: it is committed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        saved, self._under_way = self._under_way, None
        kept, self._kept = self._kept, None
        if kept is not None and self._note is not None:
            self._note(f"older checkpoints could not be removed ({kept}); the next save tries again")
        if failure is None and saved is not None and self._on_committed is not None:
            self._on_committed(saved)
        return failure

    def _partial(self, name: str) -> Path:
        return self._mirror.partial(name) if self._mirror else self.folder / f"{name}.partial"

    @property
    def _mirror(self) -> "Mirror | None":
        from meshwright.storage.mirror import Mirror

        return self._reader if isinstance(self._reader, Mirror) else None

    def _prune(self) -> None:
        newest_last, best = self.committed(), self.best()
        for checkpoint in newest_last[: -self.keep]:
            if best is None or checkpoint.step != best.step:
                if self._mirror:
                    self._mirror.remove(checkpoint.folder.name)
                partial = checkpoint.folder.with_name(f"{checkpoint.folder.name}.partial")
                with suppress(OSError):  # the next save tries again: a reader may have a file of it open
                    checkpoint.folder.rename(partial)  # first, so that half a folder is never taken for a whole one
                shutil.rmtree(partial, ignore_errors=True)


def facts_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Sizes of the files below a folder, and digests of small ones; once they are safe on disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size, digest = path.stat().st_size, {}
            if size <= _SMALL:
                digest = {"blake2b": _digest(path)}
            files[str(path.relative_to(folder))] = {"bytes": size, **digest}
        sync(path)
    return files


def is_as_written(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a file is there, and as its facts say."""
    if not path.is_file() or path.stat().st_size != facts["bytes"]:
        return False
    return "blake2b" not in facts or _digest(path) == facts["blake2b"]


# What a checkpoint says nothing of, since it was made before the key was there.
_ADDED_LATER = {
    **{f"model.{key}": field.default for key, field in ModelSpec.model_fields.items()},
    "lora.rank": 0,
    "lora.quantize": "none",
}


def check_identity(checkpoint: Checkpoint, identity: dict[str, Any], advice: str) -> None:
    """Refuse a checkpoint of another run.

    Arguments:
        checkpoint: the one to use.
        identity: what must be as it was, or the part of it that matters here.
        advice: what to do about a difference.

    Raises:
        UserError: something differs; a line for each thing.
    """
    theirs = {**_ADDED_LATER, **checkpoint.manifest["identity"]}
    differing = [
        f"  {key} = {identity[key]!r}; the checkpoint was made with {theirs.get(key)!r}"
        for key in sorted(identity)
        if identity[key] != theirs.get(key)
    ]
    if differing:
        what = "\n".join(differing)
        raise UserError(f"{checkpoint.folder}: can't be used, since the run has changed since:\n{what}\n  {advice}")


def _commit(
    partial: Path,
    final: Path,
    manifest: dict[str, Any],
    mirror: "Mirror | None",
    uploaded: dict[str, dict[str, Any]] | None,
) -> None:
    files = facts_of(partial) if uploaded is None else uploaded
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        unique = {"upload": uuid.uuid4().hex} if mirror else {}  # a copy is known by its manifest
        json.dump({**manifest, **unique, "files": files}, file, indent=1)
    sync(partial / MANIFEST)
    sync(partial)
    if mirror:
        mirror.publish(final.name, partial / MANIFEST)
    partial.rename(final)
    sync(final.parent)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _free_name(path: Path) -> Path:
    taken = 1
    while (candidate := path.with_name(f"{path.name}.damaged-{taken}")).exists():
        taken += 1
    return candidate


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and {"step", "files", "identity"} <= manifest.keys() else None


def _val_loss(checkpoint: Checkpoint) -> float:
    return checkpoint.manifest["val_loss"]
