"""Workers that are started by hand: commands of their own, each a process group."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers import MAIN, kill, run_values, write_corpus, write_run

from meshwright.track.metrics import read_metrics

# A real worker in a real group, but for the training.
WITHOUT_TRAINING = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from meshwright import api
from meshwright.cli import main
from meshwright.errors import UserError
def train(run, group):
    print("words of worker", group.rank)
    group.barrier("start")
    Path(f"here_{group.rank}").touch()
    BODY
    return SimpleNamespace(stopped_by=0)
api.train = train
main()
"""
"""The command; `BODY` is what each worker does in place of training."""


def free_port() -> int:
    """A port below those that the system gives to others by itself."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextmanager
def starting(folder: Path, coordinator: str, **sections: dict) -> Iterator[Callable[..., subprocess.Popen]]:
    """What starts a worker of two, of a run file that is written; at the end none is left.

    Arguments:
        folder: of the run file, where each worker starts.
        coordinator: `launch.coordinator`.
        sections: of the run file.
    """
    write_corpus(folder / "texts")
    launch = {"kind": "processes", "workers": 2, "devices_per_worker": 1, "start_timeout": 60.0}
    launch["coordinator"] = coordinator
    write_run(folder / "run.toml", run_values("texts", launch=launch, **sections))
    processes = []

    def start(index: int, *overrides: str, body: str = "", **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", WITHOUT_TRAINING.replace("BODY", body)] if body else MAIN
        arguments = ["train", "run.toml", f"launch.index={index}", *overrides]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            kill(process)


def ends(processes: list[subprocess.Popen], within: float = 100) -> list[tuple[int, str, str]]:
    """The exit code, the standard output and the standard error of each."""
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda process: process.communicate(timeout=within), processes))
    return [(process.returncode, *words) for process, words in zip(processes, done, strict=True)]


def losses(folder: Path) -> dict[int, float]:
    """The losses of a run directory by step."""
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record}
