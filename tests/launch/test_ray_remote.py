"""Runs on Ray whose directory lies on an object store, on nodes that share nothing else of it: they go on from there,
with the losses of the unbroken run bit for bit."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import object_store
from ray_runs import SLOWLY, Training, add_node, cluster_of, write

import meshwright as mw
from meshwright.storage.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

URL = "s3://runs/broken"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("runs"), train={"steps": 30}, schedule={"kind": "constant"})


@pytest.fixture(scope="module")
def unbroken(folder) -> dict[int, float]:
    """The losses of the same two workers without Ray, in a folder."""
    training = Training(folder, "unbroken", "launch.kind=processes", "train.steps=50")
    assert training.end() == 0, training.output
    assert len(training.losses) == 50
    return training.losses


@pytest.fixture(scope="module")
def cluster(folder):
    """Its nodes find the store by their own environment."""
    with object_store() as variables, pytest.MonkeyPatch.context() as patch:
        import boto3

        for name, value in variables.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        with cluster_of(nodes=0) as cluster:
            for number in (0, 1):
                add_machine(cluster, number, folder)
            cluster.wait_for_nodes()
            yield cluster


def add_machine(cluster, number: int, folder: Path):
    """A node with nothing on its disk."""
    return add_node(cluster, number, env_vars={"XDG_CACHE_HOME": str(folder / f"machine_{number}")})


@pytest.fixture
def train(folder, unbroken, cluster):
    """Start the run; the driver is on a machine that also has a worker, and can't reach the store itself."""
    started = []

    def start(*overrides: str) -> Training:
        where = f"run_dir={URL}", f"launch.address={cluster.address}"
        driver = {"XDG_CACHE_HOME": str(folder / "machine_0"), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
        started.append(Training(folder, "broken", *where, *overrides, main=SLOWLY, **driver))
        return started[-1]

    yield start
    for training in started:
        training.kill()


def text(store: Store, name: str) -> str:
    return (store.read(name) or b"").decode()


def losses(store: Store) -> dict[int, float]:
    records = map(json.loads, text(store, "metrics.jsonl").splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def committed(store: Store) -> list[int]:
    found = (re.fullmatch(r"checkpoints/step_(\d+)/manifest\.json", name) for name in store.names("checkpoints"))
    return sorted(int(match[1]) for match in found if match)


def starts(store: Store, rank: int) -> list[tuple[str, int]]:
    """The node and the process of a worker at each of its starts, by its log."""
    found = re.findall(r"^--- .* on (\S+), process (\d+)$", text(store, f"workers/worker_{rank}.log"), re.MULTILINE)
    return [(node, int(process)) for node, process in found]


def test_a_worker_is_killed_and_later_a_node_is_lost_with_its_disk(train, unbroken, cluster, folder, monkeypatch):
    store = Store(URL)
    first = train()
    first.until(lambda: 10 in committed(store))
    os.kill(starts(store, 1)[-1][1], signal.SIGKILL)
    assert first.end() == 0, first.output
    assert first.output.count("the workers start again") == 1
    assert re.search("resuming at step [12]0/30", first.output)
    assert losses(store) == {step: unbroken[step] for step in range(1, 31)}
    assert committed(store) == [20, 30]
    assert [len(set(starts(store, rank))) for rank in (0, 1)] == [2, 2]

    longer = train("train.steps=50")
    longer.until(lambda: 40 in committed(store))
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    add_machine(cluster, 2, folder)
    assert longer.end() == 0, longer.output
    assert "resuming at step 30/50" in longer.output and "resuming at step 40/50" in longer.output
    assert "127.0.0.4" in [starts(store, rank)[-1][0] for rank in (0, 1)]
    assert losses(store) == unbroken

    assert f"  run    {URL}\n" in longer.output
    names = {name.split("/")[0] for name in store.names()}
    assert names == {path.name for path in (folder / "runs/unbroken").iterdir()} - {".lock"}
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "reader"))
    assert mw.open_run(URL).checkpoint.step == 50
