"""What Ray costs a step.

    python benchmarks/ray_overhead.py           CPU workers: writes results/ray_overhead.json
    python benchmarks/ray_overhead.py --settings …   some of these: results/ray_overhead_some.json
    python benchmarks/ray_overhead.py --gpu     a worker with a GPU: results/ray_overhead_gpu.json

Step time under Ray Train (`launch.kind = "ray"`) beside the same processes bare (`launch.kind = "processes"`), for
steps of about 100 and 300 ms, each with a record. The aim is under 1%. In each round all start anew.

- CPU workers have the machine to themselves, one way after another, in the one order and then in the other. Two
  processes that do the same differ, too, by how they happen to lie in memory, and a machine's speed drifts: what a
  second bare one differs by can't be told from nothing. Each worker computes in one thread; once one alone, and once
  two that add up their gradients.
- Workers with a GPU share the card, so they take turns of four seconds. Whose turn it isn't is stopped (SIGSTOP), with
  all of its processes, those of the Ray cluster included. What Ray does less often than that is mostly left out.

The file is written after each round.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import card, machine, write_results
from ray_command import CPU, Command, prepared, summary


class Setting(NamedTuple):
    """Workers, and what they compute on."""

    workers: int
    environment: dict[str, str]
    overrides: tuple[str, ...] = ()
    multiple: int = 2
    """What the batch size is a multiple of."""


ON_CPU = {
    "one worker": Setting(1, {**CPU, "PJRT_NPROC": "1"}),
    "two workers": Setting(2, {**CPU, "PJRT_NPROC": "1"}),
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
ALONE_SECONDS = 12.0
TURN_SECONDS = 4.0  # processes that hear nothing of each other for 20 s end: two such stops are short enough
FIRST_OF_TURN = 3  # steps that began before the turn, or find the processor's caches without their data


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
        """Measure all ways: in as many turns (0: each by itself)."""
        found = self._in_turns(number, turns) if turns else self._alone(number)
        for way in WAYS:
            self._means[way].append(found[way])
        shown = ", ".join(f"{way} {self._means[way][-1] * 1e3:.2f} ms" for way in WAYS)
        print(f"{self.setting}, {self.seconds} s, round {number}: {shown}", flush=True)

    def _alone(self, number: int) -> dict[str, float]:
        """The mean step time of each way, one after another."""
        found = {}
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            with self._start(way, number) as command:
                before = warm_up(command)
                time.sleep(ALONE_SECONDS)
                found[way] = step_since(command, before)
        return found

    def _in_turns(self, number: int, turns: int) -> dict[str, float]:
        """The mean step time over the turns of each way."""
        with contextlib.ExitStack() as stack:
            commands = {way: stack.enter_context(self._start(way, number)) for way in WAYS}
            for command in commands.values():
                warm_up(command)
            for command in commands.values():
                command.stop()
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(turns):
                for way, command in commands.items():
                    command.go_on()
                    before = len(command.records())
                    time.sleep(TURN_SECONDS)
                    found[way].append(step_since(command, before + FIRST_OF_TURN))
                    command.stop()
        return {way: statistics.mean(found[way]) for way in WAYS}

    def _start(self, way: str, number: int) -> Command:
        name = f"{way.replace(' ', '-')}-{number}-{self.seconds}"
        return start(self._folder, self.setting, name, WAYS[way], self._size, 10**6)

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


def warm_up(command: Command) -> int:
    """Wait until it has done some steps; gives the number of its records."""
    command.wait_for(lambda: len(command.records()) > WARM_UP)
    return len(command.records())


def step_since(command: Command, first: int) -> float:
    """The mean step time from the record of this index on."""
    command.check()
    return statistics.mean(record["step_seconds"] for record in command.records()[first:])


def beyond(ones: list[float], others: list[float]) -> dict[str, Any]:
    """By what share the ones take longer than the others, round by round."""
    return summary([one / other - 1 for one, other in zip(ones, others, strict=True)])


def main() -> None:
    """Measure, and write the results after each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=8, help="of each way in a round, with --gpu")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.1, 0.3], help="seconds of a step")
    parser.add_argument("--settings", choices=ON_CPU, nargs="*", default=list(ON_CPU), help="without --gpu")
    parser.add_argument("--gpu", action="store_true", help="a worker with a GPU")
    arguments = parser.parse_args()
    measured_on, began = machine("jax", "ray", "flax", "orbax-checkpoint"), time.perf_counter()
    turns, settings, result = 0, arguments.settings, "ray_overhead"
    if settings != list(ON_CPU):
        result += "_some"
    if arguments.gpu:
        turns, settings, result = arguments.turns, list(ON_GPU), "ray_overhead_gpu"
        measured_on["card"] = card()
    with prepared() as folder:
        cases = [Case(folder, setting, seconds) for setting in settings for seconds in arguments.targets]
        for number in range(arguments.rounds):
            for case in cases:
                case.round(number, turns)
            steps = {setting: figures_of(cases, setting) for setting in settings}
            took = time.perf_counter() - began
            path = write_results(result, measured_on, {"turns": turns, "steps_of_s": steps, "took_s": took})
    print(path)


def figures_of(cases: list[Case], setting: str) -> dict[str, Any]:
    """Of a setting's cases, by the time that their steps are to take."""
    return {f"{case.seconds:g}": case.figures() for case in cases if case.setting == setting}


if __name__ == "__main__":
    main()
