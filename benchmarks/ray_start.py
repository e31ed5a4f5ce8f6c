"""How long a run under Ray takes to its first step, and to go on after a worker is killed.

    python benchmarks/ray_start.py     writes results/ray_start.json; takes some minutes

1. Seconds from the command to the first step's record, of two workers on CPUs: bare (`launch.kind = "processes"`),
   under Ray with a cluster that the command starts, and on one that runs already, each by itself.
2. Seconds from a kill -9 of a worker to the first new step's record, of worker 1 and of worker 0, which the others join
   at. The aim of both is under 15 s.

The data is prepared before; each command compiles its programs anew. Python may keep the bytecode of what is imported,
as it does unless `PYTHONDONTWRITEBYTECODE` is set: each of Ray's processes imports a thousand modules and more.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from common import machine, write_results
from ray_command import Command, prepared, running_cluster, summary


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
    """Measure, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3, help="that each is done")
    times = parser.parse_args().times
    measured_on = machine("jax", "ray", "flax", "orbax-checkpoint")
    with prepared() as folder:
        found = {"to_first_step_s": to_first_step(folder, times)}
        kills = {f"worker_{rank}": summary(recovery(folder, rank, times)) for rank in (1, 0)}
    print(write_results("ray_start", measured_on, found | {"kill_to_first_new_step_s": kills}))


if __name__ == "__main__":
    main()
