"""The head of a Ray cluster is lost: the run ends with it, and the same command goes on where there is a new one."""

import os
import signal

import pytest
from ray_runs import SLOWLY, Training, assert_gone, cluster_of, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_the_head_is_lost(folder):
    unbroken = Training(folder, "unbroken", "launch.kind=processes")
    try:
        assert unbroken.end() == 0, unbroken.output
    finally:
        unbroken.kill()
    with cluster_of(nodes=2) as cluster:
        first = Training(folder, "head", f"launch.address={cluster.address}", main=SLOWLY)
        try:
            first.until(lambda: any(first.directory.glob("checkpoints/step_*/manifest.json")))
            workers = [first.pid(0), first.pid(1)]
            os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
            assert first.end(seconds=120) != 0  # Ray gives it 60 s to come back
            assert_gone(workers, seconds=20)
        finally:
            first.kill()
    assert len(first.losses) < 60
    with cluster_of(nodes=2) as cluster:
        second = Training(folder, "head", f"launch.address={cluster.address}")
        try:
            assert second.end() == 0, second.output
        finally:
            second.kill()
    assert "resuming at step" in second.output
    assert second.losses == unbroken.losses
    assert len(second.losses) == 60
