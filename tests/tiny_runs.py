"""Short runs on a small text in `texts`, in this process, and what they left."""

import io
import json
from pathlib import Path

from helpers import run_values

import meshwright as mw
from meshwright.track.console import PlainConsole


def make(**sections):
    return mw.make_run(run_values("texts", **sections))


def losses(run_dir: Path | str) -> dict[int, float]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def evaluations(run_dir: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if "val_loss" in line]


def step_reached(run_dir: Path) -> int:
    try:
        return max(losses(run_dir), default=0)
    except (OSError, ValueError):
        return 0


def train(run, **more):
    out = io.StringIO()
    outcome = mw.train(run, console=PlainConsole(out), **more)
    return outcome, out.getvalue()
