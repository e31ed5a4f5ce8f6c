"""`metrics.jsonl` and `samples.jsonl`: one JSON object a line, written as the run goes, readable by anything."""

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshwright.errors import UserError

Table = dict[str, np.ndarray]
"""Columns by name, all of one length: float64, NaN where a record lacks the key."""

PER_SOURCE = ("tokens/", "epochs/")
"""How the keys of a training record begin that stand for one source of several; its name follows."""

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """A file of one JSON object a line, each flushed as soon as it is written.

    Numbers keep full precision. NaN and infinities become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`: JSON
    has no such numbers, and `null` would not say which of them it was. A line that a killed process left half-written
    is dropped when the file is opened again.

    Arguments:
        path: the file; made if missing, appended to if not. Its folder must exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists():
            _mend_last_line(self.path)
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Arguments:
            record: names to numbers (Python's, NumPy's, or 0-d arrays of any framework) or strings. Its `step` is the
                count of training steps done when the record was made.
        """
        plain = {key: _plain(value) for key, value in record.items()}
        self._file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps: a run that resumes from an older checkpoint takes those steps again.

        Arguments:
            step: the count of steps done in the checkpoint that the run resumes from; its own records stay.
        """
        self._file.close()
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [
            line for line, record in zip(lines, read_lines(self.path), strict=True) if record.get("step", 0) <= step
        ]
        if len(kept) < len(lines):
            beside = self.path.with_name(self.path.name + ".new")
            with beside.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        self._open()

    def close(self) -> None:
        """Close the file; harmless if it is closed already."""
        self._file.close()

    def _open(self) -> None:
        # A lone surrogate can't be encoded; as `\udcXX`, which backslashreplace makes of it, it is valid JSON.
        self._file = self.path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace", newline="\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsLog(JsonLines):
    """`metrics.jsonl`.

    A training record holds `step`, `loss` (nats a token), `learning_rate`, `grad_norm` (before clipping), `tokens`
    (trained so far), `tokens_per_second`, `step_seconds` (mean since the record before), `mfu` (a share of 1) where
    the device's peak is known, `epochs` (how often the training text was gone through; of several sources
    `epochs/<name>` and `tokens/<name>`), and any metrics of one's own. An evaluation is a record of its own: `step`,
    `val_loss` (nats a token), `val_perplexity`, `val_bits_per_byte`. Where pairs are trained on, losses are DPO's, a
    mean over pairs, evaluations have `val_loss` alone, and training records also `reward_margin` and
    `reward_accuracy`.
    """


class SamplesLog(JsonLines):
    """`samples.jsonl`: `step`, `prompt`, and `text`, which is what the model wrote after the prompt."""


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, such as `samples.jsonl`.

    Arguments:
        path: the file; its run may still be writing, so a half-written last line is left out.

    Returns:
        The records, in the order of the file.

    Raises:
        UserError: there is no such file, or a line other than the last is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; `meshwright train` writes it into the run directory")
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise UserError(f"{path}, line {number}: not a JSON object; delete the line")
    return records


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`.

    Arguments:
        path: the file; its run may still be writing.

    Returns:
        The records, in the order of the file, with NaN and infinities as floats again.

    Raises:
        UserError: there is no such file, or a line other than the last is not a JSON object.
    """
    return [{key: _number(value) for key, value in record.items()} for record in read_lines(path)]


def as_table(records: list[dict[str, Any]]) -> Table:
    """Turn records into columns; `pandas.DataFrame(as_table(records))` makes a frame of them.

    Arguments:
        records: as `read_metrics` gives them.

    Returns:
        A float64 array for each key that is a number in some record; row i is record i, NaN where it lacks the key.
    """
    names = {key: None for record in records for key, value in record.items() if isinstance(value, int | float)}
    return {name: np.array([_float(record.get(name)) for record in records], dtype=np.float64) for name in names}


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> int | float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _mend_last_line(path: Path) -> None:
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _parse(content[start:]) is None:
            file.truncate(start)
        else:
            # Killed between the closing brace and the line's end: the record is whole, so it stays.
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
