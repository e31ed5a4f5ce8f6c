import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.track.board import TensorBoardLog

TRAINING = {"step": 10, "loss": 2.5, "learning_rate": 0.25, "tokens": 2048, "mine/entropy": 0.5}


def read_back(directory: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return events


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_back(directory).Scalars(tag)]


def test_records_become_scalars(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "board")
    log.append(TRAINING)
    log.append({"step": 10, "val_loss": 3.5, "val_bits_per_byte": math.nan})
    log.close()
    assert set(read_back(tmp_path / "board").Tags()["scalars"]) == {
        "train/loss",
        "train/learning_rate",
        "train/tokens",
        "mine/entropy",
        "validation/loss",
        "validation/bits_per_byte",
    }
    assert points(tmp_path / "board", "train/loss") == [(10, 2.5)]
    assert points(tmp_path / "board", "train/tokens") == [(10, 2048.0)]
    assert points(tmp_path / "board", "validation/loss") == [(10, 3.5)]


def test_a_record_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    (file,) = tmp_path.iterdir()
    sizes = [file.stat().st_size]
    for _ in range(20):
        log.append(TRAINING)
        sizes.append(file.stat().st_size)
    log.close()
    assert len({after - before for before, after in itertools.pairwise(sizes)}) == 1
    assert sizes[1] > sizes[0]


def test_a_resumed_run_replaces_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    first = TensorBoardLog(tmp_path)
    for step in (10, 20, 30, 40):
        first.append({"step": step, "loss": 1.0})
    first.close()
    second = TensorBoardLog(tmp_path)
    second.truncate_after(20)
    second.append({"step": 30, "loss": 2.0})
    second.close()
    assert points(tmp_path, "train/loss") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"track\.tensorboard = true: needs the package tensorboard; pip install"):
        TensorBoardLog(tmp_path / "board")
    assert not (tmp_path / "board").exists()
