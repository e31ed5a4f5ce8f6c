"""`meshwright train` on Ray: start, terminal, logs, signals, exit codes, and what each worker gets."""

import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from helpers import run_values
from ray_runs import SLOWLY, Training, add_node, assert_gone, cluster_of, write

from meshwright.config import Run, make_run
from meshwright.errors import UserError
from meshwright.launch import ray_train, ray_worker
from meshwright.launch.ray_desk import News
from meshwright.launch.ray_scaling import Scale, scale_of, what_is_there
from meshwright.launch.ray_train import worker_environment
from meshwright.launch.ray_worker import Task, with_the_same_micro_batches
from meshwright.signals import Stop
from meshwright.track.console import PlainConsole


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def started():
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.kill()


def test_without_a_cluster_one_is_started_and_stopped(tmp_path, started):
    folder = write(tmp_path, launch={"devices_per_worker": 2}, train={"steps": 12})
    ours = Training(folder, "ours", RAY_ADDRESS="")
    started.append(ours)
    assert ours.end() == 0, ours.output
    other = Training(folder, "other", "launch.kind=processes")
    started.append(other)
    assert other.end() == 0, other.output
    assert len(ours.losses) == 12 and ours.losses == other.losses
    assert shown(ours.output) == shown(other.output)
    files = {path.name for path in ours.directory.iterdir()}
    assert files == {path.name for path in other.directory.iterdir()}
    logs = [(ours.directory / "workers" / f"worker_{rank}.log").read_text() for rank in (0, 1)]
    assert all(log.count("--- ") == 1 for log in logs)
    pids = [ours.pid(0), ours.pid(1)]
    assert pids[0] != pids[1]
    assert_gone(pids, seconds=5)


def shown(output: str) -> list[str]:
    """The lines of a run's output that don't depend on time, nor on the run's name."""
    lines = output.replace("runs/ours", "runs/it").replace("runs/other", "runs/it").splitlines()
    lines = [line.partition(" tokens/s")[0].rpartition("  ")[0] if "loss" in line else line for line in lines]
    return [line for line in lines if line not in ("ours", "other") and not line.startswith(("  time", "encode"))]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_the_driver_stops_all_together_and_saves(tmp_path, cluster, started, number):
    training = Training(write(tmp_path), "stopped", f"launch.address={cluster.address}", main=SLOWLY)
    started.append(training)
    training.until(lambda: training.step >= 2)
    workers = [training.pid(0), training.pid(1)]
    os.killpg(training.process.pid, number)  # as a terminal's Ctrl-C does it
    assert training.end() == 128 + number, training.output
    saved = max((training.directory / "checkpoints").glob("step_*")).name
    assert int(saved.partition("_")[2]) == training.step < 60
    assert f"stopped after step {training.step} and saved" in training.output
    assert "Traceback" not in training.output
    assert_gone(workers, seconds=5)


def test_a_mistake_is_shown_once_and_nothing_is_tried_again(tmp_path, cluster, started):
    training = Training(write(tmp_path), "wrong", f"launch.address={cluster.address}", "mesh.tensor=3", "mesh.data=1")
    started.append(training)
    assert training.end() == 1
    lines = [line for line in training.output.splitlines() if not line.startswith("encode")]
    assert len(lines) == 1 and lines[0].startswith("error: mesh"), training.output


def test_a_folder_that_a_node_lacks(monkeypatch):
    monkeypatch.setattr(ray_worker, "node", lambda: "10.0.0.7")
    with pytest.raises(UserError, match=r"^/not/here: can't be entered on the node 10\.0\.0\.7 \(No such file"):
        ray_worker.go_to("/not/here")


def test_a_worker_that_cannot_write_beats_and_says_so(monkeypatch, tmp_path):
    """Else it would be taken for dead, and all would start again."""
    done: list = []
    call = SimpleNamespace(remote=lambda *arguments: arguments or True)
    desk = SimpleNamespace(is_open=call, say=call, fail=SimpleNamespace(remote=lambda failure: done.append(failure)))
    monkeypatch.setattr("ray.get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray_worker, "node", lambda: "10.0.0.7")
    monkeypatch.setattr(ray_worker, "keep_in_touch", lambda console, rank, stop, look: done.append(f"{rank} beats"))
    monkeypatch.setattr(ray_worker, "_place", ray_worker._Place("127.0.0.1:1", 1, 2))
    monkeypatch.setattr(ray_worker, "_ended", threading.Event())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(UserError, match=r"^run_dir = 'runs/tiny': can't be written to on the node 10\.0\.0\.7 \(Not a"):
        ray_worker.train_worker(Task(a_run().to_toml(), str(tmp_path), desk, "cpu", 0, 2, "mark"))
    beats, failure = done
    assert beats == "1 beats" and failure.mistake and failure.worker == 1


def test_jobs_that_are_submitted_and_what_the_dashboard_has_of_them(tmp_path):
    pytest.importorskip("aiohttp")
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    folder = write(tmp_path, train={"steps": 12})
    main = "from meshwright.cli import main; main(prog_name='meshwright')"
    command = f'cd {folder} && {sys.executable} -c "{main}" train run.toml'
    environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    with socket.socket() as one, socket.socket() as other:  # another cluster may have the ports that they all take
        ports = [free.bind(("127.0.0.1", 0)) or free.getsockname()[1] for free in (one, other)]
    head = {"num_cpus": 2, "include_dashboard": True}
    head |= dict(zip(("dashboard_port", "dashboard_agent_listen_port"), ports, strict=True))
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        dashboard = f"http://{cluster.head_node.address_info['webui_url']}"
        client = JobSubmissionClient(dashboard)
        end = time.monotonic() + 200

        def submit(*overrides: str) -> tuple[str, str]:
            while True:
                try:
                    job = client.submit_job(entrypoint=" ".join([command, *overrides]), runtime_env=environment)
                    break
                except RuntimeError:  # the node's agent is only starting
                    assert time.monotonic() < end
                    time.sleep(0.5)
            while not client.get_job_status(job).is_terminal() and time.monotonic() < end:
                time.sleep(0.2)
            return client.get_job_status(job), client.get_job_logs(job)

        status, logs = submit("name=job")
        assert status == "SUCCEEDED", logs
        assert "step 12/12  loss" in logs and "RayTrainWorker" not in logs
        status, logs = submit("name=wrong", "mesh.tensor=3", "mesh.data=1")
        assert status == "FAILED" and "error: mesh: tensor 3" in logs
        with urlopen(f"{dashboard}/api/train/v2/runs/v1") as answer:
            runs = {run["name"]: run for run in json.load(answer)["train_runs"]}
        assert {name: run["status"] for name, run in runs.items()} == {"job": "FINISHED", "wrong": "ERRORED"}
        assert "error:\nmesh: tensor 3" in runs["wrong"]["status_detail"]
        rays = [log.read_text() for log in Path(cluster.head_node.get_logs_dir_path()).glob("worker-*.err")]
        assert sum(f"is in {folder}/runs/job/workers/worker_1.log" in log for log in rays) == 1
    finally:
        cluster.shutdown()


FROM_PYTHON = """
import faulthandler
import sys
import ray
import meshwright as mw
from meshwright.launch import ray_train

faulthandler.dump_traceback_later(200)
outcome_of = ray_train._outcome

def outcome_shown(run, fit):
    print("told Ray of", fit.result.checkpoint.path, fit.result.metrics)
    return outcome_of(run, fit)

ray_train._outcome = outcome_shown
ray.init(address=sys.argv[1], log_to_driver=False)
run = mw.load_run("run.toml", ["name=python"])
print(mw.train(run, metrics={"twice_loss": lambda update: 2 * update.loss}))
(run.directory / "checkpoints").rename(run.directory / "moved")
(run.directory / "checkpoints").write_text("in the way")
try:
    mw.train(mw.load_run("run.toml", ["name=python"]))
except mw.UserError as error:
    print("failed:", error)
print("still connected:", ray.is_initialized())
"""


def test_from_python_on_a_connection_of_the_users(tmp_path, cluster, started):
    folder = write(tmp_path, train={"steps": 12})
    training = Training(folder, "python", main=[sys.executable, "-c", FROM_PYTHON, cluster.address])
    started.append(training)
    assert training.end(240) == 0, training.output
    checkpoint = training.directory / "checkpoints" / "step_00000012"
    assert f"told Ray of {checkpoint} {{'step': 12.0, " in training.output
    assert "Outcome(run_dir=PosixPath('runs/python'), step=12, " in training.output
    assert "  twice_loss " in training.output
    assert "failed: worker 0" in training.output and "NotADirectoryError" in training.output
    assert "still connected: True" in training.output


@pytest.mark.slow
def test_a_tpu_slice(tmp_path, started):
    """Two hosts of four chips each, but for the chips: Ray places by what the nodes say of themselves."""
    with cluster_of(nodes=0) as cluster:
        for host in (0, 1):
            resources = {"TPU": 4, "accelerator_type:TPU-V4": 1, **({"TPU-v4-16-head": 1} if host == 0 else {})}
            labels = {"slice-name": "slice", "worker-id": str(host), "pod-type": "v4-16"}
            labels = {f"ray.io/tpu-{key}": value for key, value in labels.items()}
            variables = {"TPU_NAME": "slice", "TPU_WORKER_ID": str(host)}
            add_node(cluster, host, resources=resources, labels=labels, env_vars=variables)
        cluster.wait_for_nodes()
        launch = {"workers": 0, "topology": "2x2x2", "accelerator": "TPU-V4", "start_timeout": 60.0}
        folder = write(tmp_path, launch=launch, train={"steps": 3, "batch_size": 8})
        virtual = {"JAX_NUM_CPU_DEVICES": "4"}
        training = Training(folder, "tpu", f"launch.address={cluster.address}", **virtual)
        started.append(training)
        assert training.end() == 0, training.output
    assert "jax on 8 x cpu" in training.output


def test_a_failure_in_a_line():
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

    def raised(error: Exception) -> RayTaskError:
        text = f"Traceback (most recent call last):\n  File ...\n{type(error).__name__}: {error}"
        return RayTaskError("RayTrainWorker.execute", text, error, "ray::RayTrainWorker", 7, "10.0.0.7")

    assert ray_train.how(raised(raised(ValueError("too long\nby two")).as_instanceof_cause())) == "ValueError: too long"
    assert ray_train.how(ControllerError(raised(ActorDiedError()))) == "its process is gone"
    used_up = "launch.max_failures = 3 is used up"
    of_workers = ray_train._last_failure(a_run(), WorkerGroupError("", {1: raised(OSError("no"))}))
    assert of_workers.startswith(f"worker 1: OSError: no; {used_up}, and training stopped. The logs are in runs/tiny/w")
    of_ray = ray_train._last_failure(a_run(), ControllerError(RuntimeError("no controller")))
    assert of_ray.startswith("RuntimeError: no controller; training stopped. The logs are in runs/tiny/workers; the s")


def a_run(**launch) -> Run:
    return make_run(run_values("texts", launch={"kind": "ray", **launch}, train={"batch_size": 12}))


@pytest.mark.parametrize(
    ("launch", "nodes", "expected"),
    [
        ({}, [{"CPU": 4}, {"CPU": 2}, {"GPU": 0}], Scale("cpu", 2, 2, 0, {"CPU": 1})),
        ({"workers": 3, "devices_per_worker": 2}, [{"CPU": 4}], Scale("cpu", 3, 3, 2, {"CPU": 1})),
        ({"workers": [1, 4]}, [{"CPU": 4}], Scale("cpu", 1, 4, 0, {"CPU": 1})),
        ({}, [{"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 8}], Scale("gpu", 3, 3, 4, {"CPU": 1, "GPU": 4})),
        ({}, [{"CPU": 4, "GPU": 3}, {"CPU": 4, "GPU": 2}], Scale("gpu", 5, 5, 1, {"CPU": 1, "GPU": 1})),
        ({"workers": 2}, [{"CPU": 4, "GPU": 2}], Scale("gpu", 2, 2, 1, {"CPU": 1, "GPU": 1})),
        ({"workers": 1}, [{"CPU": 4, "GPU": 2}], Scale("gpu", 1, 1, 2, {"CPU": 1, "GPU": 2})),
        ({"devices_per_worker": 2}, [{"GPU": 8}, {"GPU": 3}], Scale("gpu", 5, 5, 2, {"CPU": 1, "GPU": 2})),
        ({"workers": [2, 4]}, [{"GPU": 2}, {"GPU": 2}], Scale("gpu", 2, 4, 2, {"CPU": 1, "GPU": 2})),
        ({"workers": [1, 4]}, [{"GPU": 2}, {"GPU": 2}], Scale("gpu", 1, 4, 2, {"CPU": 1, "GPU": 2})),
        ({"workers": [3, 4]}, [{"GPU": 2}], r"launch\.workers = \[3, 4\]: the cluster has 2 GPUs"),
        ({"workers": 3}, [{"GPU": 2}], r"launch\.workers = 3: the cluster has 2 GPUs"),
        ({"devices_per_worker": 4}, [{"GPU": 2}], r"launch\.devices_per_worker = 4: no node has so many GPUs; 2 are"),
        ({"accelerator": "H100"}, [{"CPU": 4}], r"the cluster has no GPUs as yet; set launch\.workers and"),
        (
            {"topology": "2x2x2", "accelerator": "TPU-V4", "workers": 3},
            [{"TPU": 4}],
            r"launch\.workers = 3: must be a multiple of the 2 workers of a slice",
        ),
        (
            {"accelerator": "TPU-V4", "devices_per_worker": 1},
            [{"TPU": 4}],
            Scale("tpu", 1, 1, 1, {"TPU": 1}, "TPU-V4"),
        ),
        ({"accelerator": "TPU-V4"}, [{"TPU": 4}], Scale("tpu", 1, 1, 4, {"TPU": 4}, "TPU-V4")),
        ({}, [{"CPU": 24, "TPU": 4}], r"the cluster has TPUs, and launch\.accelerator doesn't say which; set it"),
        ({"accelerator": "TPU-V4", "workers": 2}, [{"TPU": 4}], r"launch\.workers = 2: needs launch\.topology"),
    ],
)
def test_workers_fit_the_cluster(monkeypatch, launch, nodes, expected):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    if isinstance(expected, Scale):
        assert scale_of(a_run(**launch), nodes) == expected
    else:
        with pytest.raises(UserError, match=expected):
            scale_of(a_run(**launch), nodes)


@pytest.mark.parametrize("accelerators", ["GPU", "TPU"])
def test_a_cluster_of_accelerators_may_train_on_its_cpus(monkeypatch, accelerators):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert scale_of(a_run(), [{"CPU": 4, accelerators: 4}]).platform == "cpu"


def test_what_is_asked_for_and_what_is_there_name_the_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    node = {"CPU": 32.0, "GPU": 8.0, "accelerator_type:A100": 1.0, "node:10.0.0.1": 1.0}
    scale = scale_of(a_run(accelerator="H100", workers=2, devices_per_worker=8), [node])
    assert scale.asked_for == "2 workers of 1 CPU, 8 GPU (H100) each"
    assert what_is_there([node], {"CPU": 32.0}) == "1 nodes (32 CPU, 8 GPU (A100)), of which 32 CPU are free"
    slices = scale_of(a_run(topology="2x2x2", accelerator="TPU-V4"), [])
    assert slices.asked_for == "2 workers of 1 CPU, 4 TPU (TPU-V4 2x2x2) each"


@pytest.mark.parametrize(
    ("silence", "placed", "gives_up"), [(299.0, False, False), (301.0, False, True), (301.0, True, False)]
)
def test_workers_that_have_a_place_are_not_said_to_find_none(silence, placed, gives_up):
    """One that hangs with all its threads is Ray's to find out, and to start again."""
    news, ended, console = News(silence=silence, placed=placed), iter([True, False]), PlainConsole(sys.stderr)
    ray = SimpleNamespace(
        get=lambda found: found, exceptions=SimpleNamespace(RayError=OSError), nodes=list, available_resources=dict
    )
    desk = SimpleNamespace(news=SimpleNamespace(remote=lambda: news))
    fit = SimpleNamespace(is_alive=lambda: next(ended))
    attend = partial(ray_train._attend, ray, a_run(), Scale("cpu", 2, 2, 1), desk, fit, console, Stop())
    if not gives_up:
        assert attend()
        return
    with pytest.raises(
        UserError, match=r"launch\.start_timeout = 300: 2 workers of .* found no place, or didn't start"
    ):
        attend()


@pytest.mark.parametrize(
    ("size", "most", "micro", "expected"), [(2, 2, 12, 12), (1, 2, 12, 6), (2, 3, 6, 4), (1, 5, 12, 12)]
)
def test_fewer_workers_take_more_turns_over_a_batch(size, most, micro, expected):
    run = a_run()
    run = run.model_copy(update={"train": run.train.model_copy(update={"micro_batch_size": micro})})
    assert with_the_same_micro_batches(run, size, most).micro_batch_size == expected


def test_what_a_worker_finds_in_its_environment(monkeypatch):
    passed = {
        "JAX_ENABLE_X64": "0",
        "XLA_FLAGS": "--a",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
        "PJRT_NPROC": "3",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
    monkeypatch.setattr(os, "environ", {**passed, "HOME": "/h", "PYTHONPATH": "/p"})
    run = a_run()
    gpu, cpu = (worker_environment(run, platform, Path("/r")) for platform in ("gpu", "cpu"))
    assert gpu["LD_LIBRARY_PATH"] == "" and "JAX_PLATFORMS" not in gpu and "HOME" not in gpu
    assert "LD_LIBRARY_PATH" not in cpu and cpu["JAX_PLATFORMS"] == "cpu"
    assert cpu["MALLOC_ARENA_MAX"] == "1" and "MALLOC_ARENA_MAX" not in gpu
    assert gpu["JAX_COMPILATION_CACHE_DIR"] == "/r/workers/compiled" and "JAX_COMPILATION_CACHE_DIR" not in cpu
    for environment in (gpu, cpu):
        assert passed.items() <= environment.items()
        assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/p"


@pytest.mark.parametrize("changes", [{"train": {"compile_cache": "off"}}, {"run_dir": "s3://runs/tiny"}])
def test_where_nothing_compiled_is_kept_in_the_run_directory(monkeypatch, changes):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    kept, not_kept = a_run(), make_run(run_values("texts", **changes))
    of_kept, of_not_kept = (worker_environment(run, "gpu", Path("/r")) for run in (kept, not_kept))
    assert of_kept.items() - of_not_kept.items() == {("JAX_COMPILATION_CACHE_DIR", "/r/workers/compiled")}
