"""A made-up run, small and whole."""

import json
import math
from pathlib import Path

import pytest

from meshwright.config import make_run
from meshwright.track.metrics import MetricsLog, SamplesLog


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory of 300 steps: every second one logged, an evaluation and a sample every 100."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    run = make_run({"name": "small-run", "data": {"train": "a<b>.txt"}, "model": {"preset": "gpt2"}})
    (folder / "run.toml").write_text(run.to_toml(), encoding="utf-8")
    with MetricsLog(folder / "metrics.jsonl") as metrics, SamplesLog(folder / "samples.jsonl") as samples:
        for step in range(2, 301, 2):
            metrics.append(
                {
                    "step": step,
                    "loss": 2 + 6 * math.exp(-step / 50) + 0.01 * (step % 7),
                    "learning_rate": 1e-3,
                    "grad_norm": 1.0,
                    "tokens": step * 2048,
                    "tokens_per_second": 10_000.0,
                    "step_seconds": 0.5,
                }
            )
            if step % 100 == 0:
                loss = {100: 3.25, 200: 2.125, 300: 2.5}[step]
                metrics.append(
                    {"step": step, "val_loss": loss, "val_perplexity": math.exp(loss), "val_bits_per_byte": 1.5}
                )
                samples.append({"step": step, "prompt": "def ", "text": f"f{step}(x):\n    <script>alert(1)</script>"})
    checkpoint = folder / "checkpoints" / "step_00000300"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 300, "parameters": 1_234_567}))
    return folder
