"""Which of Ray's own actors and processes a run goes without."""

import contextlib
import os
import time
from collections.abc import Iterator
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


@pytest.fixture
def settings(monkeypatch):
    """What a cluster that is started without `ray_cluster` is to have in common with one that is."""
    for name, value in {"AUTH_MODE": "disabled", "USAGE_STATS_ENABLED": "0", "worker_niceness": "0"}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    return monkeypatch


@pytest.mark.timeout(240)
def test_a_cluster_is_its_own_where_it_was_started_for_a_run_alone(settings):
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


@pytest.mark.timeout(240)
def test_no_worker_is_started_before_it_is_asked_for(settings):
    asked_for = 2  # the task's, and that of the actor that Ray Train will ask for
    settings.setattr(os, "cpu_count", lambda: 6)  # Ray starts as many at a time
    settings.setattr(ray_cluster, "core_count", lambda: 5)
    with ray_cluster.ray_cluster("", "launch.kind") as ray:
        assert ray.cluster_resources()["CPU"] == 5
        ray.get(ray.remote(lambda: None).remote())
        assert not reaches(asked_for + 1, seconds=6)
    ray.init(address="local", include_dashboard=False, num_cpus=6)
    try:
        assert reaches(asked_for + 1, seconds=60)
    finally:
        ray.shutdown()


def reaches(many: int, seconds: float) -> bool:
    """Whether there are so many workers in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if workers() >= many:
            return True
        time.sleep(0.2)
    return False


def workers() -> int:
    """How many processes the raylet of this process has started to work for it."""
    raylets = [pid for pid, program in children(os.getpid()) if program == "raylet"]
    names = [name for pid in raylets for _, name in children(pid)]
    return sum(name.startswith(("default_worker.py", "ray::")) and not name.endswith("Agent") for name in names)


def programs_of_ray() -> set[str]:
    """What runs here of Ray's package, workers left out."""
    return {program for _, program in children(os.getpid())}


def children(parent: int) -> Iterator[tuple[int, str]]:
    """The processes that another has started, with the last part of the path of what of Ray's package each runs, or
    what it calls itself.
    """
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if int(file.with_name("stat").read_text().rpartition(")")[2].split()[1]) == parent:
                parts = file.read_text().split("\0")
                of_ray = [path.name for path in map(Path, parts[:4]) if path.is_file() and "ray" in path.parts]
                yield int(file.parent.name), of_ray[0] if of_ray else parts[0]
