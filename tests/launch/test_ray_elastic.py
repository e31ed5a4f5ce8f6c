"""A run on Ray with fewest and most workers: fewer when a node is lost, more when one comes; the losses stay."""

import os
import signal

import pytest
from ray_runs import SLOWLY, Training, add_node, cluster_of, write


@pytest.mark.slow
def test_it_shrinks_and_grows(tmp_path):
    folder = write(tmp_path, train={"steps": 600})
    alone = Training(folder, "alone", "launch.kind=local", "launch.workers=0")
    assert alone.end() == 0, alone.output
    with cluster_of(nodes=2) as cluster:
        training = Training(
            folder, "elastic", f"launch.address={cluster.address}", "launch.workers=[1, 2]", main=SLOWLY
        )
        try:
            training.until(lambda: training.step >= 13)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            training.until(lambda: training.starts() == 2)
            add_node(cluster, 7)
            training.until(lambda: training.output.count("resuming at step") == 2)
            training.until(lambda: training.step > grown_at(training) + 10)
            os.kill(training.process.pid, signal.SIGINT)
            assert training.end() == 128 + signal.SIGINT, training.output
        finally:
            training.kill()
    devices = [
        line for line in (training.directory / "log.txt").read_text().splitlines() if line.startswith("  engine ")
    ]
    assert devices == [f"  engine  jax on {many}, float32{mesh}" for many, mesh in (TWO, ONE, TWO)]
    expected = {step: loss for step, loss in alone.losses.items() if step <= training.step}
    assert training.losses == pytest.approx(expected, abs=1e-5)
    assert f"stopped after step {grown_at(training)} and saved" in training.output, "steps were lost when it grew"


def grown_at(training: Training) -> int:
    return int(training.output.split("resuming at step ")[2].partition("/")[0])


TWO, ONE = ("2 x cpu", "; data 2"), ("cpu", "")
