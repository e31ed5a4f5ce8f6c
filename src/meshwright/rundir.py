"""The folder of a run: files anyone can read."""

import fcntl
import filecmp
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.config import Run, load_run
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.files import LOCK, LOCK_TEXT, replace_text
from meshwright.models.spec import ModelSpec

HEADER = "# The run file as resolved by meshwright: every key with its value. Written anew at each start.\n"
"""How a `run.toml` begins that isn't the user's own."""


class RunDirectory:
    """Where the files of a run lie.

    Arguments:
        path: the folder; need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.run_file = path / "run.toml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.log = path / "log.txt"
        self.report = path / "report.html"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.tokenizer = path / "tokenizer"
        self.checkpoints = path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other processes from training in it.

        Raises:
            UserError: another process trains in it, its file system has no locks, or the folder can't be made or holds
                a `run.toml` of the user's.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a")  # noqa: SIM115  (closed below)
            theirs = self.run_file.read_text(encoding="utf-8") if self.run_file.exists() else ""
        except OSError as error:
            raise UserError(f"run_dir = {str(self.path)!r}: can't be written to: {error.strerror}") from None
        if theirs and not theirs.startswith(HEADER):
            raise UserError(
                f"{self.run_file}: would be overwritten by the resolved run file; set run_dir to a folder of its own"
            )
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path}: another process is training in this run directory; wait for it, stop it, "
                    "or give this run another name"
                ) from None
            except OSError as error:
                raise UserError(
                    f"run_dir = {str(self.path)!r}: its file system can't lock a file ({error.strerror}), by which two "
                    "runs are kept apart; set run_dir to another one, or have it mounted with locks"
                ) from None
            lock.truncate(0)
            lock.write(LOCK_TEXT)
            lock.flush()
            yield

    def begin(self, run: Run, spec: ModelSpec, tokenizer: Tokenizer, store: Path | None) -> None:
        """Write the resolved run file and the tokenizer.

        Arguments:
            run: the run.
            spec: its architecture, with its vocabulary.
            tokenizer: the run's.
            store: the token store, where its documents came from Python: from now on the run file names it.
        """
        model = run.model.model_copy(update={"vocab_size": spec.vocab_size})
        data = run.data.model_copy(update={"train": str(store), "store": ""}) if store else run.data
        text = HEADER + run.model_copy(update={"model": model, "data": data}).to_toml()
        replace_text(self.run_file, text)
        beside = self.tokenizer.with_name("tokenizer.partial")
        shutil.rmtree(beside, ignore_errors=True)
        tokenizer.save(beside)
        if _is_alike(beside, self.tokenizer):
            shutil.rmtree(beside)
        else:
            shutil.rmtree(self.tokenizer, ignore_errors=True)
            beside.rename(self.tokenizer)

    def load_run(self) -> Run:
        """The resolved run file.

        Raises:
            UserError: this isn't the directory of a run.
        """
        if not self.run_file.is_file():
            raise UserError(f"{self.path}: not a run directory (no run.toml in it); give the folder that train wrote")
        run = load_run(self.run_file)
        return run.model_copy(update={"run_dir": str(self.path)})


def _is_alike(ours: Path, theirs: Path) -> bool:
    names = sorted(path.name for path in ours.iterdir())
    if not theirs.is_dir() or sorted(path.name for path in theirs.iterdir()) != names:
        return False
    return filecmp.cmpfiles(ours, theirs, names, shallow=False)[0] == names
