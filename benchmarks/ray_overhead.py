"""What Ray costs: step time, time to the first step, and time to go on after a worker is killed.

    python benchmarks/ray_overhead.py                 writes results/ray_overhead.json and, of 2. and 3., which it does
                                                      first, results/ray_start.json; takes an hour
    python benchmarks/ray_overhead.py --gpu           just 1., of a worker with a GPU: results/ray_overhead_gpu.json

1. Step time of CPU workers under Ray Train (`launch.kind = "ray"`) beside the same processes bare
   (`launch.kind = "processes"`), for steps of about 100 and 300 ms, each with a record. In each round all start, and
   then take turns of four seconds: whose turn it isn't is stopped (SIGSTOP), with all of its processes, those of the
   Ray cluster included. So a machine whose speed drifts is the same for both. Two processes that do the same differ,
   too, by how they happen to lie in memory; so a second bare one takes turns with them, and what it differs by is what
   can't be told from nothing. What Ray does less often than every four seconds is mostly left out: it falls due while
   it is stopped, and is done before the steps that count. Once two workers share the cores, but for two that are left
   to Ray's own processes where there are more; and once one worker computes in one thread. The aim is under 1%.
2. Seconds from the command to the first step's record: bare, with a cluster that the command starts, and on one that
   runs already, each by itself.
3. Seconds from a kill -9 of a worker to the first new step's record, of worker 1 and of worker 0, which the others join
   at. The aim is under 15 s.

The data is prepared before; each command compiles its programs anew. Python may keep the bytecode of what is imported,
as it does unless `PYTHONDONTWRITEBYTECODE` is set: each of Ray's processes imports a thousand modules and more.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


class Setting(NamedTuple):
    """Workers, and what they compute on."""

    workers: int
    environment: dict[str, str]
    overrides: tuple[str, ...] = ()
    multiple: int = 2
    """What the batch size is a multiple of."""


CORES = len(os.sched_getaffinity(0))
CPU = {"JAX_PLATFORMS": "cpu"}
ON_CPU = {
    "two workers": Setting(2, {**CPU, "PJRT_NPROC": str(max(CORES // 2 - 1, 1))}),
    "one worker of one thread": Setting(1, {**CPU, "PJRT_NPROC": "1"}),
}
ON_GPU = {
    "one worker with a GPU": Setting(
        1,
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # those who take turns share the card
        ("model.preset=gpt2", "train.sequence_length=1024", "train.micro_batch_size=16"),
        16,
    ),
}
SETTINGS = ON_CPU | ON_GPU
WAYS = {"bare": "processes", "bare again": "processes", "ray": "ray"}
FIRST_SIZE = 16
WARM_UP = 5
TURN_SECONDS = 4.0  # processes that hear nothing of each other for 20 s end: two such stops are short enough
FIRST_OF_TURN = 3  # steps that began before the turn, or find the processor's caches without their data
PATIENCE = 300.0


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


def start(folder: Path, setting: str, name: str, kind: str, size: int, steps: int) -> Command:
    """A command of a setting."""
    workers, environment, more, _ = SETTINGS[setting]
    overrides = [f"launch.kind={kind}", f"launch.workers={workers}", f"train.batch_size={size}", f"train.steps={steps}"]
    return Command(folder, f"{name}-{workers}", *overrides, *more, environment=environment)


def size_for(folder: Path, setting: str, seconds: float) -> int:
    """The batch size whose steps take about so long, bare."""
    with start(folder, setting, f"size-{seconds}", WAYS["bare"], FIRST_SIZE, 60) as command:
        command.wait()
        times = [record["step_seconds"] for record in command.records() if "step_seconds" in record]
    multiple = SETTINGS[setting].multiple
    return max(multiple * round(FIRST_SIZE * seconds / statistics.median(times) / multiple), multiple)


class Case:
    """Steps of a setting that take about so long, bare and under Ray; a round adds to its figures."""

    def __init__(self, folder: Path, setting: str, seconds: float) -> None:
        self.setting, self.seconds = setting, seconds
        self._folder, self._size = folder, size_for(folder, setting, seconds)
        self._means: dict[str, list[float]] = {way: [] for way in WAYS}

    def round(self, number: int, turns: int) -> None:
        """Start all ways, and have them take turns."""
        with contextlib.ExitStack() as stack:
            commands = {
                way: stack.enter_context(self._start(f"{way.replace(' ', '-')}-{number}", kind))
                for way, kind in WAYS.items()
            }
            for command in commands.values():
                command.wait_for(lambda command=command: len(command.records()) > WARM_UP)
            found = in_turns(commands, turns)
        for way in WAYS:
            self._means[way].append(statistics.mean(found[way]))
        shown = ", ".join(f"{way} {self._means[way][-1] * 1e3:.2f} ms" for way in WAYS)
        print(f"{self.setting}, {self.seconds} s, round {number}: {shown}", flush=True)

    def _start(self, name: str, kind: str) -> Command:
        return start(self._folder, self.setting, f"{name}-{self.seconds}", kind, self._size, 10**6)

    def figures(self) -> dict[str, Any]:
        """Of all rounds; a step under Ray is set against the mean of the two bare ones."""
        means = self._means
        bare = [(one + other) / 2 for one, other in zip(means["bare"], means["bare again"], strict=True)]
        return {
            "batch_size": self._size,
            **{f"{way.replace(' ', '_')}_step_s": summary(means[way]) for way in WAYS},
            "overhead": beyond(means["ray"], bare),
            "bare_again_beside_bare": beyond(means["bare again"], means["bare"]),
        }


def in_turns(commands: dict[str, Command], turns: int) -> dict[str, list[float]]:
    """The mean step time of each turn."""
    for command in commands.values():
        command.stop()
    found: dict[str, list[float]] = {way: [] for way in commands}
    for _ in range(turns):
        for way, command in commands.items():
            command.go_on()
            found[way].append(step_of_a_turn(command))
            command.stop()
    return found


def step_of_a_turn(command: Command) -> float:
    """The mean step time of the next seconds."""
    before = len(command.records())
    time.sleep(TURN_SECONDS)
    command.check()
    return statistics.mean(record["step_seconds"] for record in command.records()[before + FIRST_OF_TURN :])


def beyond(ones: list[float], others: list[float]) -> dict[str, Any]:
    """By what share the ones take longer than the others, round by round."""
    return summary([one / other - 1 for one, other in zip(ones, others, strict=True)])


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


def to_first_step(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds from the command to the first step: bare, with a Ray cluster of its own, and on one that runs."""
    with_own = {
        "bare": first_steps(folder, "bare", rounds, "launch.kind=processes"),
        "ray": first_steps(folder, "ray", rounds, "launch.kind=ray"),
    }
    with running_cluster() as address:
        return with_own | {
            "running": first_steps(folder, "running", rounds, "launch.kind=ray", f"launch.address={address}")
        }


def first_steps(folder: Path, name: str, rounds: int, *overrides: str) -> dict[str, Any]:
    """Seconds from a command to its first step, with nothing beside it."""
    found = []
    for number in range(rounds):
        with Command(folder, f"{name}-{number}", "train.steps=100000", *overrides) as command:
            found.append(command.wait_for(lambda command=command: command.starts() > 0) - command.started)
        print(f"{name}: first step after {found[-1]:.1f} s", flush=True)
    return summary(found)


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
    """Measure, and write the results after each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8, help="of each way in a round")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.1, 0.3])
    parser.add_argument("--gpu", action="store_true", help="a worker with a GPU; no starts and no kills")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # no stopped process is left behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    measured_on, began = machine("jax", "ray", "flax", "orbax-checkpoint"), time.perf_counter()
    if arguments.gpu:
        code = "import jax; print(jax.devices()[0].device_kind)"
        measured_on["card"] = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN_FILE)
        subprocess.run([*MAIN, "prepare", "run.toml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        if not arguments.gpu:
            found = {"to_first_step_s": to_first_step(folder, arguments.starts)}
            found["kill_to_first_new_step_s"] = {
                f"worker_{rank}": summary(recovery(folder, rank, arguments.starts)) for rank in (1, 0)
            }
            print(write_results("ray_start", measured_on, found))
        cases = [
            Case(folder, setting, seconds)
            for setting in (ON_GPU if arguments.gpu else ON_CPU)
            for seconds in arguments.targets
        ]
        for number in range(arguments.rounds):
            for case in cases:
                case.round(number, arguments.turns)
            steps = {case.setting: figures_of(cases, case.setting) for case in cases}
            figures = {"turns": arguments.turns, "steps_of_s": steps, "took_s": time.perf_counter() - began}
            path = write_results("ray_overhead_gpu" if arguments.gpu else "ray_overhead", measured_on, figures)
    print(path)


def figures_of(cases: list[Case], setting: str) -> dict[str, Any]:
    """Of a setting's cases, by the time that their steps are to take."""
    return {f"{case.seconds:g}": case.figures() for case in cases if case.setting == setting}


if __name__ == "__main__":
    main()
