"""Which of Ray's own actors and processes a run goes without."""

import contextlib
import os
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray.train import ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from meshwright.launch import ray_cluster, ray_train

pytestmark = pytest.mark.timeout(120)


def callbacks(kind) -> set[str]:
    trainer = kind(lambda: None, scaling_config=ScalingConfig(num_workers=1))
    return {type(one).__name__ for one in trainer._create_default_callbacks()}


@pytest.mark.parametrize("own", [False, True])
def test_what_has_no_work_is_left_out(own, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_own", own)
    left_out = callbacks(DataParallelTrainer) - callbacks(ray_train._with_fewer_actors(DataParallelTrainer))
    assert left_out == {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if own else set())


@pytest.mark.timeout(240)
def test_a_cluster_is_its_own_where_it_was_started_for_a_run_alone(monkeypatch):
    # What Ray and the run would set in this process, and leave there for the tests that follow.
    for name, value in {"AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    ray_of = ray_cluster.ray_cluster
    with ray_of("", "launch.kind") as ray:
        assert ray_cluster.is_own_cluster()
        ours = programs_of_ray()
    assert not ray_cluster.is_own_cluster()
    ray.init(address="local", include_dashboard=False, num_cpus=1)
    try:
        with ray_of("", "launch.kind"):
            assert not ray_cluster.is_own_cluster()
            rays = programs_of_ray()
    finally:
        ray.shutdown()
    assert "raylet" in ours
    assert rays - ours == {"dashboard.py", "monitor.py", "log_monitor.py"}


def programs_of_ray() -> set[str]:
    """The last parts of the paths of what runs here of Ray's package, workers left out."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            own = int(file.with_name("stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            paths = [Path(part) for part in file.read_text().split("\0")]
            found |= {path.name for path in paths[:4] if own and path.is_file() and "ray" in path.parts}
    return found
