"""What Ray costs: step time, time to the first step, and time to go on after a worker is killed.

    python benchmarks/ray_overhead.py                 writes results/ray_overhead.json; takes some twenty minutes
    python benchmarks/ray_overhead.py --steps-only    just 1., into results/ray_overhead_steps.json

1. Step time of CPU workers under Ray Train (`launch.kind = "ray"`) beside the same processes bare
   (`launch.kind = "processes"`), for steps of about 100 and 300 ms. The two ways take turns; each turn is a command of
   its own, and no Ray runs while the bare one does. Once two workers keep all cores of a small machine at work, from
   which Ray's own processes then take their time; and once one worker computes in one thread, which leaves a core to
   spare, as machines with accelerators have. On a machine of eight cores and more, two workers compute in two threads
   each. The aim is under 1%.
2. Seconds from the command to the first step's record: bare, with a cluster that the command starts, and on one that
   runs already.
3. Seconds from a kill -9 of a worker to the first new step's record, of worker 1 and of worker 0, which the others join
   at. The aim is under 15 s.

The data is prepared before; each command compiles its programs anew. A median hides what disturbs few steps, so the
mean stands beside it.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import machine, write_results

MAIN = [sys.executable, "-c", "from meshwright.cli import main; main(prog_name='meshwright')"]
RUN_FILE = """
[data]
train = "python-stdlib"
store = "store"
[tokenizer]
kind = "bytes"
[model]
preset = "llama-tiny"
[train]
sequence_length = 128
log_every = 1
eval_every = 0
sample_every = 0
[checkpoint]
every = 0
[launch]
kind = "processes"
workers = 2
devices_per_worker = 1
"""
ONE: dict[str, Any] = {"workers": 1, "environment": {"PJRT_NPROC": "1"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "two workers": {"workers": 2, "environment": {}},
    "one worker of one thread": ONE,
}
if (os.cpu_count() or 1) >= 8:
    spared = {"workers": 2, "environment": {"PJRT_NPROC": "2"}}
    SETTINGS = {"two workers of two threads": spared, "one worker of one thread": ONE}
WAYS = {"bare": "processes", "ray": "ray"}
FIRST_SIZE = 16
WARM_UP = 5
PATIENCE = 300.0


class Command:
    """A `meshwright train` at work in a folder; ended with the `with` block.

    Arguments:
        folder: where `run.toml` is.
        name: of the run.
        overrides: of the run file.
        environment: what is added to this process's.
    """

    def __init__(self, folder: Path, name: str, *overrides: str, environment: dict[str, str] | None = None) -> None:
        self.directory = folder / "runs" / name
        self._output = folder / f"{name}.out"
        self.started = time.perf_counter()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*MAIN, "train", "run.toml", f"name={name}", *overrides],
                cwd=folder,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        self._process.kill()
        self._process.wait()

    def records(self) -> list[dict[str, Any]]:
        """The training records so far."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def starts(self) -> int:
        """How often a first step was done: its record has no time of a step, which is compilation for the most."""
        return sum("step_seconds" not in record for record in self.records())

    def wait_for(self, condition: Callable[[], bool]) -> float:
        """Wait; gives the time of the clock."""
        while not condition():
            if self._process.poll() is not None or time.perf_counter() - self.started > PATIENCE:
                raise RuntimeError(f"{self.directory.name} failed:\n{self._output.read_text()[-4000:]}")
            time.sleep(0.01)
        return time.perf_counter()

    def end(self) -> None:
        """Wait for the end of all steps."""
        if self._process.wait(PATIENCE):
            raise RuntimeError(f"{self.directory.name} failed:\n{self._output.read_text()[-4000:]}")

    def worker(self, rank: int) -> int:
        """The process id of a worker, on Ray."""
        log = (self.directory / f"workers/worker_{rank}.log").read_text(errors="replace")
        return int(re.findall(r"(?m)^--- .*, process (\d+)$", log)[-1])


def steps_of(folder: Path, setting: str, name: str, way: str, size: int, steps: int) -> tuple[float, list[float]]:
    """Seconds to the first step, and of each step but the first ones."""
    given = SETTINGS[setting]
    overrides = [f"launch.kind={WAYS[way]}", f"launch.workers={given['workers']}"]
    overrides += [f"train.batch_size={size}", f"train.steps={steps}"]
    name = f"{name}-{given['workers']}"
    with Command(folder, name, *overrides, environment=given["environment"]) as command:
        first = command.wait_for(lambda: command.starts() > 0) - command.started
        command.end()
        times = [record["step_seconds"] for record in command.records() if "step_seconds" in record]
    return first, times[WARM_UP:-1]  # the last is read without another behind it


def size_for(folder: Path, setting: str, seconds: float, steps: int) -> int:
    """The batch size whose steps take about so long, bare."""
    _, times = steps_of(folder, setting, f"size-{seconds}", "bare", FIRST_SIZE, steps)
    return max(2 * round(FIRST_SIZE * seconds / statistics.median(times) / 2), 2)


def beside_each_other(folder: Path, setting: str, seconds: float, rounds: int, steps: int) -> dict[str, Any]:
    """Step times of both ways, in turns."""
    size = size_for(folder, setting, seconds, steps)
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    firsts: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        ways = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        for way in ways:
            first, found = steps_of(folder, setting, f"{way}-{seconds}-{number}", way, size, steps)
            firsts[way].append(first)
            times[way].append(found)
            print(
                f"{setting}, {seconds} s, {way}: {statistics.median(found):.4f} s a step, first after {first:.1f} s",
                flush=True,
            )
    figures: dict[str, Any] = {"batch_size": size, "steps": steps - 2 - WARM_UP}
    for way in WAYS:
        figures[way] = {"to_first_step_s": summary(firsts[way])}
    for name, middle in (("median", statistics.median), ("mean", statistics.mean)):
        of = {way: [middle(found) for found in times[way]] for way in WAYS}
        for way in WAYS:
            figures[way][f"{name}_step_s"] = summary(of[way])
        figures[f"overhead_of_{name}s"] = summary([ray / bare - 1 for bare, ray in zip(*of.values(), strict=True)])
    return figures


def summary(values: list[float]) -> dict[str, Any]:
    """Of one value a round."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"median": statistics.median(values), "mean": statistics.mean(values), "standard_error": error, "of": values}


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """A Ray cluster of this machine; gives its address."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def first_step_on(folder: Path, address: str, rounds: int) -> list[float]:
    """Seconds from the command to the first step, on a cluster that runs."""
    found = []
    for number in range(rounds):
        overrides = ["launch.kind=ray", f"launch.address={address}", "train.steps=100000"]
        with Command(folder, f"running-{number}", *overrides) as command:
            found.append(command.wait_for(lambda command=command: command.starts() > 0) - command.started)
        print(f"on a running cluster: first step after {found[-1]:.1f} s", flush=True)
    return found


def recovery(folder: Path, rank: int, rounds: int) -> list[float]:
    """Seconds from a kill -9 of a worker to the first new step."""
    found = []
    overrides = ["launch.kind=ray", "train.steps=100000", "checkpoint.every=10", f"launch.max_failures={rounds}"]
    with Command(folder, f"killed-{rank}", *overrides) as command:
        command.wait_for(lambda: command.starts() > 0)
        for number in range(rounds):
            began = command.records()[-1]["step"]
            command.wait_for(lambda began=began: command.records()[-1]["step"] >= began + 30)
            os.kill(command.worker(rank), signal.SIGKILL)
            killed = time.perf_counter()
            found.append(command.wait_for(lambda number=number: command.starts() > number + 1) - killed)
            print(f"worker {rank} killed: first new step after {found[-1]:.1f} s", flush=True)
    return found


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training in each turn")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.1, 0.3])
    parser.add_argument("--steps-only", action="store_true", help="no starts and no kills")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    measured_on, began = machine("jax", "ray", "flax", "orbax-checkpoint"), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN_FILE)
        subprocess.run([*MAIN, "prepare", "run.toml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        steps = {setting: steps_beside_each_other(folder, setting, arguments) for setting in SETTINGS}
        figures: dict[str, Any] = {"steps_of_s": steps}
        if not arguments.steps_only:
            with running_cluster() as address:
                figures["to_first_step_on_a_running_cluster_s"] = summary(
                    first_step_on(folder, address, arguments.starts)
                )
            killed = {f"worker_{rank}": summary(recovery(folder, rank, arguments.starts)) for rank in (1, 0)}
            figures["kill_to_first_new_step_s"] = killed
    figures["took_s"] = time.perf_counter() - began
    print(json.dumps(figures, indent=1))
    if not arguments.dry:
        print(write_results("ray_overhead_steps" if arguments.steps_only else "ray_overhead", measured_on, figures))


def steps_beside_each_other(folder: Path, setting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times of both ways, for each of the targets."""
    return {
        f"{seconds:g}": beside_each_other(
            folder, setting, seconds, arguments.rounds, round(arguments.seconds / seconds)
        )
        for seconds in arguments.targets
    }


if __name__ == "__main__":
    main()
