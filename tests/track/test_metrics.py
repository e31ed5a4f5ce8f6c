import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.track.metrics import MetricsLog, SamplesLog, as_table, read_lines, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_numbers_come_back_in_full_precision_and_in_their_own_type(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append({"step": np.int64(1), "loss": np.float32(0.1), "learning_rate": 0.1 + 0.2, "odd": np.array(1e-300)})
    (record,) = read_metrics(path)
    assert record == {"step": 1, "loss": float(np.float32(0.1)), "learning_rate": 0.1 + 0.2, "odd": 1e-300}
    assert isinstance(record["step"], int)


def test_a_record_is_on_disk_as_soon_as_it_is_appended(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 1, "loss": 2.0})
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    log.close()


def test_not_finite_numbers_keep_the_file_valid_json_and_come_back(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    (record,) = read_metrics(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf


def test_samples_keep_any_text(tmp_path: Path) -> None:
    text = 'NaN\n\r\n"quoted" \\ \u2028 \x00 \x1b[31m é 日本 \U0001f600 \udc80'
    with SamplesLog(tmp_path / "samples.jsonl") as log:
        log.append({"step": 1, "prompt": "NaN", "text": text})
        log.append({"step": 2, "prompt": "", "text": ""})
    assert read_lines(tmp_path / "samples.jsonl") == [
        {"step": 1, "prompt": "NaN", "text": text},
        {"step": 2, "prompt": "", "text": ""},
    ]


@pytest.mark.parametrize("half", [b'{"step": 3, "lo', '{"step": 3, "text": "é'.encode()[:-1], b'{"step": 3', b"{"])
def test_a_half_written_last_line_is_dropped(path: Path, half: bytes) -> None:
    with MetricsLog(path) as log:
        log.append({"step": 1})
        log.append({"step": 2})
    path.write_bytes(path.read_bytes() + half)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    with MetricsLog(path) as log:
        log.append({"step": 3})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_a_whole_last_line_without_its_end_stays(path: Path) -> None:
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with MetricsLog(path) as log:
        log.append({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_file_of_one_half_line_becomes_empty(path: Path) -> None:
    path.write_bytes(b'{"st')
    MetricsLog(path).close()
    assert path.read_bytes() == b""


def test_truncate_after_drops_later_steps_and_goes_on(path: Path) -> None:
    with MetricsLog(path) as log:
        for step in (10, 20, 30, 40):
            log.append({"step": step, "loss": 0.1 * step})
            log.append({"step": step, "val_loss": math.nan})
        before = path.read_bytes().splitlines(keepends=True)
        log.truncate_after(20)
        assert path.read_bytes() == b"".join(before[:4])
        log.append({"step": 30, "loss": 9.0})
    assert path.read_bytes() == b"".join(before[:4]) + b'{"step": 30, "loss": 9.0}\n'
    assert list(path.parent.iterdir()) == [path]


def test_truncate_after_the_last_step_leaves_the_file_as_it_is(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append({"step": 10})
        inode = path.stat().st_ino
        log.truncate_after(10)
        log.append({"step": 20})
    assert path.stat().st_ino == inode
    assert [record["step"] for record in read_metrics(path)] == [10, 20]


def test_table_has_a_column_for_each_key_and_nan_where_it_is_missing(path: Path) -> None:
    with MetricsLog(path) as log:
        log.append({"step": 10, "loss": 2.0, "tag": "warm"})
        log.append({"step": 10, "val_loss": 3.0})
        log.append({"step": 20, "loss": math.inf, "mine": 1})
    table = as_table(read_metrics(path))
    assert list(table) == ["step", "loss", "val_loss", "mine"]
    assert all(column.dtype == np.float64 for column in table.values())
    np.testing.assert_array_equal(table["step"], [10, 10, 20])
    np.testing.assert_array_equal(table["loss"], [2.0, np.nan, np.inf])
    np.testing.assert_array_equal(table["val_loss"], [np.nan, 3.0, np.nan])
    np.testing.assert_array_equal(table["mine"], [np.nan, np.nan, 1.0])


def test_mistakes_name_the_file(path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_metrics(path)
