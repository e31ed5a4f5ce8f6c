"""The PyTorch engine on Ray: two workers train as one process would, and go on bit for bit when they are killed."""

import os
import signal
from types import SimpleNamespace

import pytest
from helpers import run_values
from ray_runs import Training, assert_gone, cluster_of, write

pytest.importorskip("transformers")

from meshwright.config import Run, make_run
from meshwright.errors import UserError
from meshwright.launch.group import ALONE
from meshwright.launch.joining import Found
from meshwright.launch.ray_scaling import Scale, scale_of
from meshwright.launch.ray_train import worker_environment
from meshwright.launch.ray_worker import Task, check_devices

QWEN = {"preset": "qwen2.5-0.5b", "head_width": 16, "kv_heads": 1}


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sections = {"model": QWEN, "mesh": {"data": 1, "fsdp": -1}, "schedule": {"kind": "constant"}}
    sections |= {"engine": "torch", "checkpoint": {"every": 20}, "train": {"steps": 200}}
    return write(tmp_path_factory.mktemp("runs"), **sections)


@pytest.fixture
def train(folder, cluster):
    """Start a run on the cluster; its processes are gone at the end of the test."""
    started = []

    def start(name: str, *overrides: str) -> Training:
        started.append(Training(folder, name, f"launch.address={cluster.address}", *overrides))
        return started[-1]

    yield start
    for training in started:
        training.kill()


def without_ray(folder, name: str, *overrides: str) -> Training:
    """The same run, to its end, in processes that this machine starts, or in one."""
    training = Training(folder, name, *overrides)
    assert training.end() == 0, training.output
    return training


@pytest.mark.slow
def test_two_workers_train_as_one_process_would_though_each_is_killed(folder, train):
    training = train("killed")
    training.until(lambda: training.step > 25)
    first, second = training.pid(0), training.pid(1)
    assert {training.node(0), training.node(1)} == {"127.0.0.2", "127.0.0.3"}
    os.kill(second, signal.SIGKILL)
    training.until(lambda: training.starts() == 2 and training.step > 65)
    assert training.pid(0) != first
    os.kill(training.pid(0), signal.SIGKILL)
    assert training.end() == 0, training.output
    assert training.starts() == 3
    assert training.output.count("the workers start again") == 2
    assert_gone([first, second, training.pid(0), training.pid(1)], seconds=5)
    unbroken = without_ray(folder, "unbroken", "launch.kind=processes")
    assert "engine  torch on 2 x cpu, float32; fsdp 2\n" in training.output and "torch on 2" in unbroken.output
    assert len(unbroken.losses) == 200
    assert training.losses == unbroken.losses
    alone = without_ray(folder, "alone", "launch.kind=local", "launch.workers=0", "train.steps=40")
    assert "engine  torch on cpu, float32\n" in alone.output
    assert {step: training.losses[step] for step in range(1, 41)} == pytest.approx(alone.losses, rel=1e-5)


def test_a_mistake_is_shown_once_and_nothing_is_tried_again(train):
    training = train("wrong", "mesh.tensor=3", "mesh.fsdp=1")
    assert training.end() == 1
    lines = [line for line in training.output.splitlines() if not line.startswith("encode")]
    assert len(lines) == 1 and lines[0].startswith("error: mesh"), training.output


def a_run(**launch) -> Run:
    return make_run(run_values("texts", engine="torch", launch={"kind": "ray", **launch}))


@pytest.mark.parametrize(
    ("launch", "nodes", "expected"),
    [
        ({}, [{"CPU": 4}, {"CPU": 2}], Scale("cpu", 2, 2, 1, {"CPU": 1})),
        ({"workers": [1, 4]}, [{"CPU": 4}], Scale("cpu", 1, 4, 1, {"CPU": 1})),
        ({}, [{"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 8}], Scale("gpu", 12, 12, 1, {"CPU": 1, "GPU": 1})),
        ({"workers": 2}, [{"CPU": 4, "GPU": 8}], Scale("gpu", 2, 2, 1, {"CPU": 1, "GPU": 1})),
        (
            {"devices_per_worker": 2},
            [{"GPU": 8}],
            r"launch\.devices_per_worker = 2: a process of the PyTorch engine has",
        ),
        ({"accelerator": "TPU-V4"}, [{"TPU": 4}], r"launch\.accelerator = 'TPU-V4': the PyTorch engine has no TPUs"),
    ],
)
def test_each_worker_has_one_device(monkeypatch, launch, nodes, expected):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    if isinstance(expected, Scale):
        assert scale_of(a_run(**launch), nodes) == expected
    else:
        with pytest.raises(UserError, match=expected):
            scale_of(a_run(**launch), nodes)


def test_what_a_worker_finds_in_its_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"JAX_ENABLE_X64": "0", "NCCL_SOCKET_IFNAME": "eth1", "HOME": "/h"})
    run = a_run()
    gpu, cpu = (worker_environment(run, platform, tmp_path) for platform in ("gpu", "cpu"))
    assert cpu["CUDA_VISIBLE_DEVICES"] == "" and not {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"} & gpu.keys()
    for environment in (gpu, cpu):
        assert environment["NCCL_SOCKET_IFNAME"] == "eth1"
        assert not [name for name in environment if name.startswith("JAX_") or name == "HOME"]


def test_a_worker_without_the_card_that_it_was_to_have(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr("meshwright.launch.ray_worker.node", lambda: "10.0.0.7")
    task = Task("", "", None, "gpu", 1, 1, "")
    check_devices(task, Found("PyTorch", 1, 1, "gpu"), ALONE)
    with pytest.raises(
        UserError, match=r"PyTorch has the platform cpu where gpu was asked for \(on the node 10\.0\.0\.7\)"
    ):
        check_devices(task, Found("PyTorch", 1, 1, "cpu"), ALONE)
    slices = Task("", "", None, "tpu", 1, 1, "")
    check_devices(slices, Found("JAX", 1, 1, "tpu"), ALONE)
    with pytest.raises(UserError, match=r"JAX has the platform cpu where tpu was asked for"):
        check_devices(slices, Found("JAX", 1, 1, "cpu"), ALONE)
    with pytest.raises(
        UserError, match=r"JAX has 1 processes where 2 were asked for, 4 devices of a process where 1 were"
    ):
        check_devices(slices, Found("JAX", 1, 4, "tpu"), SimpleNamespace(size=2, gather=lambda value, name: [value]))
