"""Whatever dies of a run on Ray: it goes on, with the losses of the unbroken run bit for bit, or says why it can't."""

import os
import signal
import subprocess
import sys
import time

import pytest
from ray_runs import SLOWLY, Training, add_node, assert_gone, cluster_of, is_alive, write


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def unbroken(folder) -> dict[int, float]:
    """The losses of the same two workers without Ray."""
    training = Training(folder, "unbroken", "launch.kind=processes")
    assert training.end() == 0, training.output
    assert len(training.losses) == 60
    return training.losses


@pytest.fixture
def train(folder, unbroken, cluster):
    """Start a run on the cluster; its processes are gone at the end of the test."""
    started = []

    def start(name: str, *overrides: str) -> Training:
        started.append(Training(folder, name, f"launch.address={cluster.address}", *overrides, main=SLOWLY))
        return started[-1]

    yield start
    for training in started:
        training.kill()


def begun(training: Training, step: int = 13) -> list[int]:
    """Wait until a run is under way; its workers' processes."""
    training.until(lambda: training.step >= step)
    return [training.pid(0), training.pid(1)]


def saved(training: Training) -> list[int]:
    """The same, once there is a checkpoint to go on from."""
    training.until(lambda: any(training.directory.glob("checkpoints/step_*/manifest.json")))
    return begun(training)


def again(training: Training, starts: int, beyond: int) -> None:
    """Wait until its workers have started so often, and are beyond a step."""
    training.until(lambda: training.starts() == starts and training.step > beyond)


def test_a_worker_and_then_the_coordinator_is_killed(train, unbroken):
    training = train("killed")
    _, worker = saved(training)
    os.kill(worker, signal.SIGKILL)
    again(training, starts=2, beyond=23)
    coordinator = training.pid(0)
    assert coordinator != worker
    os.kill(coordinator, signal.SIGKILL)
    assert training.end() == 0, training.output
    assert training.losses == unbroken
    assert training.starts() == 3, training.output
    assert training.output.count("the workers start again") == 2 and "(failure 2)" in training.output
    assert training.output.count("resuming at step") == 2


@pytest.mark.slow
def test_the_driver_is_killed_and_the_same_command_goes_on(train, unbroken):
    first = train("driver")
    workers = saved(first)
    os.kill(first.process.pid, signal.SIGKILL)
    second = train("driver")  # at once, while the workers may still be there
    assert_gone(workers, seconds=20)
    assert second.end() == 0, second.output
    assert "resuming at step" in second.output
    assert second.losses == unbroken


@pytest.mark.slow
def test_a_worker_that_hangs_is_started_again(train, unbroken):
    training = train("hangs", "launch.hang_timeout=6")
    workers = saved(training)
    os.kill(workers[1], signal.SIGSTOP)
    again(training, starts=2, beyond=13)
    assert "no step was finished in launch.hang_timeout = 6 s" in training.output
    assert "resuming at step" in training.output
    assert training.end() == 0, training.output
    assert training.losses == unbroken
    assert_gone(workers, seconds=5)


def test_an_exception_in_a_worker_ends_the_run_at_once(train):
    training = train("raises", "checkpoint.keep=1")
    checkpoints = training.directory / "checkpoints"
    workers = begun(training, step=11)
    checkpoints.rename(training.directory / "moved")
    checkpoints.write_text("in the way of the next save")
    assert training.end() == 1
    assert training.output.count("Traceback (most recent call last)") == 1
    assert "error: worker 0, on the node 127.0.0." in training.output
    assert "NotADirectoryError" in training.output.splitlines()[-1]
    assert training.starts() == 1
    assert_gone(workers, seconds=10)


def test_restarts_are_counted(train):
    training = train("counted", "launch.max_failures=0")
    workers = begun(training, step=2)
    os.kill(workers[1], signal.SIGKILL)
    assert training.end() == 1
    last = training.output.splitlines()[-1]
    assert last.startswith("error: ") and "worker 1: its process is gone" in last
    assert "launch.max_failures = 0 is used up" in last


def test_a_cluster_without_a_place_for_all_is_not_asked_for_ever(train):
    training = train("no-place", "launch.workers=3", "launch.start_timeout=8")
    assert training.end(seconds=60) == 1
    last = training.output.splitlines()[-1]
    assert last.startswith("error: launch.start_timeout = 8: 3 workers of 1 CPU each found no place, or ")
    assert "the cluster has 3 nodes (1 CPU; 1 CPU; nothing), of which 2 CPU are free" in last


@pytest.mark.slow
def test_the_object_store_of_the_head_is_full(train, cluster, unbroken):
    filler = subprocess.Popen(
        [sys.executable, "-c", FILL, cluster.address], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert filler.stdout is not None and filler.stdout.readline() == "full\n"
        training = train("full")
        workers = saved(training)
        os.kill(workers[1], signal.SIGKILL)
        assert training.end() == 0, training.output
        assert "resuming at step" in training.output
        assert is_alive(filler.pid)
    finally:
        filler.kill()
        filler.wait()
    assert training.losses == unbroken


FILL = """
import logging, sys, time
import numpy as np, ray
ray.init(address=sys.argv[1], logging_level=logging.CRITICAL, log_to_driver=False)
kept = [ray.put(np.ones(8 << 20, np.uint8)) for _ in range(12)]
print("full", flush=True)
time.sleep(300)
"""


@pytest.mark.slow
def test_a_node_is_lost_and_another_comes(train, cluster, unbroken):
    training = train("node")
    saved(training)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    time.sleep(2)
    add_node(cluster, 5)
    assert training.end() == 0, training.output
    assert training.starts() == 2 and "resuming at step" in training.output
    assert training.losses == unbroken


@pytest.mark.slow
def test_a_node_is_drained(train, cluster, unbroken):
    add_node(cluster, 6)
    training = train("drained", "launch.max_failures=0", "checkpoint.every=1000")
    begun(training)
    drained = next(node.node_id for node in cluster.worker_nodes if node.node_ip_address == training.node(1))
    options = {"address": cluster.address, "node-id": drained, "reason": "DRAIN_NODE_REASON_PREEMPTION"}
    options |= {"reason-message": "test", "deadline-remaining-seconds": "60"}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words]
    subprocess.run(command, check=True, capture_output=True)
    assert training.end() == 0, training.output
    assert training.starts() == 2
    assert "the workers are moved" in training.output and "resuming at step" in training.output
    assert training.losses == unbroken
