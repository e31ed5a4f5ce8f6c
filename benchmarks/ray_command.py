"""Commands of `meshwright train` and a Ray cluster, for the benchmarks of Ray."""

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

MAIN = [sys.executable, "-c", "from meshwright.cli import main; main(prog_name='meshwright')"]
CPU = {"JAX_PLATFORMS": "cpu"}
PATIENCE = 300.0
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


@contextlib.contextmanager
def prepared() -> Iterator[Path]:
    """A folder with the run file and its data; Python keeps the bytecode of what it imports, as it does by default."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # no process is left behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN_FILE)
        subprocess.run([*MAIN, "prepare", "run.toml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        yield folder


class Command:
    """A `meshwright train` at work in a folder; ended with the `with` block.

    Arguments:
        folder: where `run.toml` is.
        name: of the run.
        overrides: of the run file.
        environment: what is added to this process's.
    """

    def __init__(self, folder: Path, name: str, *overrides: str, environment: Mapping[str, str] = CPU) -> None:
        self.directory = folder / "runs" / name
        self._output = folder / f"{name}.out"
        self._stopped: set[int] = set()
        self.started = time.perf_counter()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*MAIN, "train", "run.toml", f"name={name}", *overrides],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        self.go_on()
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
            self.check(time.perf_counter() - self.started < PATIENCE)
            time.sleep(0.01)
        return time.perf_counter()

    def wait(self) -> None:
        """Wait for the end of all steps."""
        if self._process.wait(PATIENCE):
            self.check()

    def stop(self) -> None:
        """Stop all processes of the command until they `go_on`."""
        self._stopped |= set(family(self._process.pid))
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have all of them go on."""
        self._signal(signal.SIGCONT)
        self._stopped.clear()

    def _signal(self, number: int) -> None:
        for one in self._stopped:
            with contextlib.suppress(OSError):
                os.kill(one, number)

    def check(self, in_time: bool = True) -> None:
        """Raise if the command has ended, or isn't in time."""
        if self._process.poll() is not None or not in_time:
            raise RuntimeError(f"{self.directory.name} failed:\n{self._output.read_text()[-4000:]}")

    def worker(self, rank: int) -> int:
        """The process id of a worker, on Ray."""
        log = (self.directory / f"workers/worker_{rank}.log").read_text(errors="replace")
        return int(re.findall(r"(?m)^--- .*, process (\d+)$", log)[-1])


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """A Ray cluster of this machine; gives its address."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else workers give way to any other process
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def summary(values: list[float]) -> dict[str, Any]:
    """Of one value a round."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"median": statistics.median(values), "mean": statistics.mean(values), "standard_error": error, "of": values}
