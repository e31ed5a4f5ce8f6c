"""Checkpoints as folders: written beside, then renamed into place with a manifest. The same for every engine.

A folder without its manifest does not exist as far as training is concerned, so a crash at any moment leaves either
the whole checkpoint or none.
"""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.files import sync
from meshwright.models.spec import ModelSpec

MANIFEST = "manifest.json"
_SMALL = 64 * 2**20  # bytes up to which a file's content is checked, not its size alone
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One that was written whole."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates done when it was taken."""
        return self.manifest["step"]

    def damage(self) -> str | None:
        """What is wrong with its files; None: they are as they were written."""
        for name, facts in self.manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes where the manifest says {facts['bytes']:,}"
            if "blake2b" in facts and _digest(path) != facts["blake2b"]:
                return f"{name} has other content than was written"
        return None


class Checkpoints:
    """The checkpoints of one run.

    Arguments:
        folder: made if missing.
        keep: how many of the newest stay; the best by validation loss stays besides.
        commits: whether this process commits and removes checkpoints; of several that train together one does, and
            the others only write their part of the state.
    """

    def __init__(self, folder: Path, keep: int, *, commits: bool = True):
        self.folder = folder
        self.keep = keep
        self._commits = commits
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def committed(self) -> list[Checkpoint]:
        """Every committed one, oldest first; folders without a readable manifest are passed over."""
        found = []
        for path in self.folder.glob("step_*"):
            if _NAME.fullmatch(path.name) and (manifest := _read_manifest(path / MANIFEST)):
                found.append(Checkpoint(path, manifest))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def at(self, step: int) -> Checkpoint:
        """The committed one of a step."""
        return next(checkpoint for checkpoint in self.committed() if checkpoint.step == step)

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
            damage = Checkpoint(path, manifest).damage() if manifest else f"{MANIFEST} is missing or unreadable"
            if damage:
                note(f"checkpoint {path} skipped: {damage}")
            elif manifest:
                yield Checkpoint(path, manifest)

    def sweep(self) -> None:
        """Remove what crashes left of saves and removals; call it while no other run trains here."""
        if not self._commits:
            return
        for partial in self.folder.glob("step_*.partial"):
            shutil.rmtree(partial)

    def save(self, write: Callable[[Path], Callable[[], None]], manifest: dict[str, Any]) -> None:
        """Start a checkpoint; it is committed in the background.

        Arguments:
            write: starts to write the state into an empty folder and returns a function that waits for it
                (`Engine.save`).
            manifest: `step`, `val_loss` (None: not evaluated), and whatever else it should say.

        Raises:
            Exception: what went wrong with the one before.
        """
        self.wait()
        name = f"step_{manifest['step']:08d}"
        partial = self.folder / f"{name}.partial"
        if self._commits:
            partial.mkdir(parents=True)
        finish = write(partial)

        def commit() -> None:
            try:
                finish()
                if self._commits:
                    _commit(partial, self.folder / name, manifest)
                    self._prune()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=commit, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint under way is committed.

        Raises:
            Exception: what went wrong with it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _prune(self) -> None:
        newest_last, best = self.committed(), self.best()
        for checkpoint in newest_last[: -self.keep]:
            if best is None or checkpoint.step != best.step:
                partial = checkpoint.folder.with_name(f"{checkpoint.folder.name}.partial")
                checkpoint.folder.rename(partial)  # first, so that half a folder is never taken for a whole one
                shutil.rmtree(partial)


# What a checkpoint says nothing of, since it was made before the key was there.
_ADDED_LATER = {f"model.{key}": field.default for key, field in ModelSpec.model_fields.items()} | {"lora.rank": 0}


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


def _commit(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    files = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        size = path.stat().st_size
        files[str(path.relative_to(partial))] = {"bytes": size} | ({"blake2b": _digest(path)} if size <= _SMALL else {})
        sync(path)
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "files": files}, file, indent=1)
    sync(partial / MANIFEST)
    sync(partial)
    if final.exists():
        final.rename(_free_name(final))  # damaged, or it would have been gone on from
    partial.rename(final)
    sync(final.parent)


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
