"""What stays of checkpoints when files are damaged, disks are full, and folders can't be removed."""

import re
import sys
from pathlib import Path

import pytest
from helpers import meshwright, run_values, write_corpus, write_run

from meshwright.checkpoints import Checkpoints
from meshwright.engines.base import Engine
from meshwright.errors import UserError
from meshwright.launch.group import ALONE
from meshwright.resuming import resume


def write(folder: Path):
    (folder / "data").write_bytes(b"some state")
    return lambda: None


def fails(folder: Path):
    (folder / "data").write_bytes(b"half of")

    def finish():
        raise OSError(28, "disk full")

    return finish


def save(checkpoints: Checkpoints, step: int, val_loss: float | None = None, how=write) -> None:
    checkpoints.save(how, {"step": step, "val_loss": val_loss, "identity": {}})


def save_all(checkpoints: Checkpoints, *steps: tuple[int, float | None]) -> None:
    for step, val_loss in steps:
        save(checkpoints, step, val_loss)
    checkpoints.wait()


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.committed()]


class Restoring(Engine):
    """An engine that can just be put where a checkpoint left it."""

    def restore(self, folder: Path) -> None:
        self.restored = folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_best_stays_when_the_newest_are_worse(folder):
    checkpoints = Checkpoints(folder, 2)
    save_all(checkpoints, (1, None), (2, 1.0), (3, None), (4, 2.0), (5, 2.5))
    assert steps(checkpoints) == [2, 4, 5]
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("losses", [(None, None), (2.0, 1.0)])
def test_damaged_ones_are_never_kept_in_place_of_whole_ones(folder, losses):
    save_all(Checkpoints(folder, 2), (100, losses[0]), (200, losses[1]))
    (folder / "step_00000200/data").write_bytes(b"Some state")
    checkpoints, notes = Checkpoints(folder, 1), []
    resumed = resume(Restoring(), checkpoints, lambda step: {}, notes.append, ALONE)
    assert resumed is not None and resumed.step == 100
    assert "step_00000200 skipped: data has other content" in notes[0] and "step_00000200.damaged-1" in notes[1]
    save_all(checkpoints, (150, 3.0))
    assert 150 in steps(checkpoints) and 200 not in steps(checkpoints)
    assert all(checkpoint.damage() is None for checkpoint in checkpoints.committed())
    assert (folder / "step_00000200.damaged-1/data").read_bytes() == b"Some state"
    save_all(checkpoints, (200, 0.5))
    assert steps(checkpoints) == [200]


def test_a_save_that_fails_is_not_silent(folder):
    checkpoints = Checkpoints(folder, 2)
    save(checkpoints, 1, how=fails)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.wait()
    assert checkpoints.committed() == []


def test_after_a_save_that_failed_the_next_is_written(folder):
    notes: list[str] = []
    checkpoints = Checkpoints(folder, 2, on_failed=notes.append)
    save(checkpoints, 1, how=fails)
    save(checkpoints, 2)
    assert steps(checkpoints) == [2] and not list(folder.glob("*.partial"))
    assert notes == ["the checkpoint of step 1 could not be saved ([Errno 28] disk full); that of step 2 is"]
    save(checkpoints, 3, how=fails)
    with pytest.raises(OSError, match="disk full"):
        save(checkpoints, 4, how=fails)
    assert steps(checkpoints) == [2] and len(notes) == 1


def test_one_of_several_processes_ends_when_its_save_has_failed(folder):
    checkpoints = Checkpoints(folder, 2)
    save(checkpoints, 1, how=fails)
    with pytest.raises(OSError, match="disk full"):
        save(checkpoints, 2)
    assert steps(checkpoints) == []


def test_one_that_cannot_be_removed_ends_nothing(folder, monkeypatch):
    checkpoints, rename = Checkpoints(folder, 1), Path.rename
    save_all(checkpoints, (1, None))

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step_00000001":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        save_all(checkpoints, (2, None))
    assert steps(checkpoints) == [1, 2]
    save_all(checkpoints, (3, None))
    assert steps(checkpoints) == [3]


def test_one_that_another_worker_alone_sees(folder):
    with pytest.raises(UserError, match=r"step_00000004: isn't here, or its manifest\.json can't be read, though anot"):
        Checkpoints(folder, 1).at(4)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from meshwright.cli import main
main(prog_name="meshwright")
"""


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_disk_without_room_is_told_in_a_line(engine, tmp_path, monkeypatch):
    if engine == "torch":
        pytest.importorskip("transformers")
    monkeypatch.setattr("helpers.MAIN", [sys.executable, "-c", LIMITED])
    write_corpus(tmp_path / "texts")
    write_run(tmp_path / "run.toml", {"engine": engine, **run_values("texts", model={"width": 64, "ffn_width": 128})})
    done = meshwright("train", "run.toml", cwd=tmp_path, timeout=200)
    assert done.returncode == 1
    # Threads of TensorStore's write to it, too, while it is written.
    assert re.search(r"error: \S*: File too large\n", done.stderr), done.stderr
    assert not list((tmp_path / "runs/tiny/checkpoints").glob("step_????????"))
