"""How much of a step is the host's own work, and whether the host ever makes the device wait.

    python benchmarks/host_overhead.py

1. The loop around an engine whose steps cost nothing: order, reading, batching, records, files, progress, each step.
2. The JAX engine alone: how long `train_step` keeps its caller (dispatch), beside how long the step then takes. On a
   CPU the device's threads take the caller's core as soon as the step starts, so the caller's own processor time is
   what a step costs the host; the time by the clock stands beside.
3. The whole loop with the JAX engine, beside the same steps dispatched back to back with nothing in between.

The aim is under 1 ms of host work a step, first and second taken together (`host_s`).
"""

import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from common import machine, write_results

from meshwright import trainer
from meshwright.config import Run, make_run
from meshwright.data.loader import TrainData
from meshwright.data.prepare import prepare
from meshwright.engines.jax.engine import JaxEngine
from meshwright.track.console import PlainConsole


def a_run(folder: str, name: str, steps: int) -> Run:
    """The demo's model and data, with nothing but training and logging."""
    return make_run(
        {
            "name": name,
            "run_dir": f"{folder}/{name}",
            "data": {"train": "python-stdlib", "store": f"{folder}/store"},
            "tokenizer": {"kind": "bytes"},
            "model": {"preset": "llama-tiny"},
            "train": {"steps": steps, "eval_every": 0, "sample_every": 0, "log_every": 10},
            "checkpoint": {"every": 0},
        }
    )


class InstantEngine:
    """An engine whose steps cost nothing."""

    rows = slice(None)
    parameters = active_parameters = 0
    description = "nothing"
    identity: ClassVar[dict[str, str]] = {}

    def is_finite(self) -> bool:
        """See `Engine.is_finite`."""
        return True

    def train_step(self, batch: Any, stop: int = 0) -> dict[str, Any]:
        """See `Engine.train_step`."""
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": 2048.0}

    def save(self, folder: Path) -> Any:
        """See `Engine.save`."""
        (folder / "nothing").write_bytes(b"")
        return lambda: None


def loop_alone(folder: str, steps: int = 3000) -> float:
    """Seconds a step of the loop around an instant engine; the difference of two lengths leaves the start out."""

    def total(steps: int, name: str) -> float:
        start = time.perf_counter()
        trainer.train(a_run(folder, name, steps), lambda *_: InstantEngine(), PlainConsole(io.StringIO()))
        return time.perf_counter() - start

    total(10, "warm")
    return (total(steps, "long") - total(steps // 10, "short")) / (steps - steps // 10)


def dispatch(folder: str, steps: int = 100) -> tuple[float, float, float]:
    """Median seconds of a `train_step` call, of the processor and by the clock, and of the whole step."""
    run = a_run(folder, "dispatch", steps)
    engine = JaxEngine(run, run.model.spec.model_copy(update={"vocab_size": 257}))
    used, kept, taken = [], [], []
    for batch in TrainData(prepare(run), run).batches(0):
        start, cpu_start = time.perf_counter(), time.thread_time()
        values = engine.train_step(batch)
        used.append(time.thread_time() - cpu_start)
        kept.append(time.perf_counter() - start)
        float(values["loss"])
        taken.append(time.perf_counter() - start)
    return statistics.median(used[5:]), statistics.median(kept[5:]), statistics.median(taken[5:])


def loop_and_bare(folder: str, steps: int = 200) -> tuple[float, float]:
    """Seconds a step of the whole loop, as it logs them itself, and of bare steps back to back."""
    run = a_run(folder, "whole", steps)
    spec = run.model.spec.model_copy(update={"vocab_size": 257})
    trainer.train(run, JaxEngine, PlainConsole(io.StringIO()))
    from meshwright.track.metrics import read_metrics

    logged = [record["step_seconds"] for record in read_metrics(f"{folder}/whole/metrics.jsonl")[2:]]
    engine, batches = JaxEngine(run, spec), list(TrainData(prepare(run), run).batches(0))
    float(engine.train_step(batches[0])["loss"])
    bare = []
    for first in range(0, steps, 10):
        start = time.perf_counter()
        for batch in batches[first : first + 10]:
            values = engine.train_step(batch)
        float(values["loss"])
        bare.append((time.perf_counter() - start) / 10)
    return statistics.median(logged), statistics.median(bare)


def main() -> None:
    """Measure, write the results, print them."""
    measured_on = machine("jax", "grain")
    with tempfile.TemporaryDirectory() as folder:
        loop = loop_alone(folder)
        used, kept, step = dispatch(folder)
        whole, bare = loop_and_bare(folder)
    figures = {
        "loop_s": loop,
        "dispatch_s": used,
        "dispatch_by_the_clock_s": kept,
        "host_s": loop + used,
        "step_s": step,
        "step_in_the_loop_s": whole,
        "bare_step_s": bare,
    }
    for name, value in figures.items():
        print(f"{name:<24} {value * 1e3:8.3f} ms")
    print(write_results("host_overhead", measured_on, figures))


if __name__ == "__main__":
    main()
