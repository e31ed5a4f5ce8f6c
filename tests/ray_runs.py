"""Runs on a Ray cluster whose nodes are all on this machine: started as commands, watched through their files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import MAIN, run_values, write_corpus, write_run

SLOWLY = [
    sys.executable,
    "-c",
    """
import sys, time
import jax
from meshwright import api
from meshwright.cli import main

def slow(update):
    jax.debug.callback(lambda: time.sleep(0.1))
    return update.loss

train = api.train
api.train = lambda run: train(run, metrics={"slow": slow})
main(prog_name="meshwright")
""",
]
"""The command, with steps that take long enough for something to happen in between."""


@contextmanager
def cluster_of(nodes: int, head_cpus: int = 0) -> Iterator[Any]:
    """A Ray cluster: a head, where drivers run, and nodes of one CPU each."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # read when Ray is imported
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": head_cpus, "include_dashboard": False, "object_store_memory": 100 * 2**20},
    )
    try:
        for number in range(nodes):
            add_node(cluster, number)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, number: int, **resources: Any) -> Any:
    """Give a cluster a node; each has an address of its own, else Ray takes them for one."""
    arguments = {"num_cpus": 1, "object_store_memory": 100 * 2**20, **resources}
    return cluster.add_node(node_ip_address=f"127.0.0.{number + 2}", **arguments)


def write(folder: Path, **sections: dict) -> Path:
    """A folder with a text and a run file of two workers."""
    write_corpus(folder / "texts")
    sections = {"checkpoint": {"every": 10}, **sections}
    sections["train"] = {"steps": 60, **sections.get("train", {})}
    sections["launch"] = {"kind": "ray", "workers": 2, **sections.get("launch", {})}
    values = run_values("texts", **sections)
    values["data"]["store"] = "store"
    write_run(folder / "run.toml", values)
    return folder


class Training:
    """A command `meshwright train`, and what it writes.

    Arguments:
        folder: holds `run.toml`; the command starts there.
        name: of the run.
        overrides: of the run file.
        main: the command; see `SLOWLY`.
        environment: what else it says.
    """

    def __init__(self, folder: Path, name: str, *overrides: str, main: list[str] = MAIN, **environment: str):
        self.folder, self.name, self.directory = folder, name, folder / "runs" / name
        self._log = folder / f"{name}.out"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*main, "train", "run.toml", f"name={name}", *overrides],
                cwd=folder,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has written to its standard output and error."""
        return self._log.read_text(errors="replace")

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        return losses(self.directory)

    @property
    def step(self) -> int:
        """The last that was logged."""
        return max(self.losses, default=0)

    def pid(self, rank: int) -> int:
        """The process of a worker; of the last one that was started."""
        return int(self._begun(rank)[1])

    def node(self, rank: int) -> str:
        """The address of its node."""
        return self._begun(rank)[0]

    def _begun(self, rank: int) -> tuple[str, str]:
        log = (self.directory / "workers" / f"worker_{rank}.log").read_text(errors="replace")
        return re.findall(r"^--- .* on (\S+), process (\d+)$", log, re.MULTILINE)[-1]

    def starts(self) -> int:
        """How often its workers have begun to train."""
        log = self.directory / "log.txt"
        return log.read_text().count("  engine ") if log.exists() else 0

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait while the command runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < end, f"took more than {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def end(self, seconds: float = 300) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"took more than {seconds} s:\n{self.output}") from None

    def kill(self) -> None:
        """SIGKILL the command and what it has started itself."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def losses(directory: Path) -> dict[int, float]:
    """The losses of a run by step."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: list[int], seconds: float) -> None:
    """Wait until processes are gone."""
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
