"""Workers of the PyTorch engine that are started by hand: they train as one, and none hangs without the others."""

import signal
import socket
import time

import pytest
from by_hand_runs import ends, free_port, losses, starting
from helpers import meshwright, run_values, wait_for

pytest.importorskip("transformers")

import meshwright as mw
from meshwright.launch.addresses import own_address
from meshwright.launch.by_hand import place_by_hand

ALONE = ["run_dir=alone", "launch.kind=local", "launch.workers=0", "launch.coordinator=", "mesh.fsdp=1"]


@pytest.fixture
def start(tmp_path):
    """Start a worker, at the address that other machines have for this one."""
    host = own_address("192.0.2.1") or "127.0.0.1"
    mesh = {"data": 1, "fsdp": 2}
    with starting(tmp_path, f"{host}:{free_port()}", engine="torch", mesh=mesh) as start:
        yield start


def test_two_train_as_one_process_would(start, tmp_path):
    (code, out, err), (code_1, out_1, err_1) = ends([start(0), start(1)])
    assert (code, code_1) == (0, 0), (err, err_1)
    assert "engine  torch on 2 x cpu, float32; fsdp 2" in out
    assert (out_1, err_1) == ("", "worker 1 of 2: its log is runs/tiny/workers/worker_1.log\n")
    done = meshwright("train", "run.toml", *ALONE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "engine  torch on cpu, float32\n" in done.stdout
    theirs, ours = losses(tmp_path / "runs/tiny"), losses(tmp_path / "alone")
    assert len(theirs) == 12
    assert theirs == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_is_killed_amid_training_ends_the_other_soon_and_is_named(start, tmp_path, killed):
    workers = [start(index, "train.steps=100000") for index in (0, 1)]
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, workers[0])
    began = time.monotonic()
    workers[killed].send_signal(signal.SIGKILL)
    code, _, err = ends(workers)[1 - killed]
    assert code == 1
    assert time.monotonic() - began < 20
    assert f"error: worker {killed} ({socket.gethostname()}) is gone or has failed" in err


def test_what_starts_them_imports_no_jax(start, tmp_path):
    body = "Path(f'{group.rank}.txt').write_text(f\"{type(group).__name__} {'jax' in sys.modules}\")"
    ended = ends([start(index, body=body) for index in (0, 1)])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["TorchGroup False"] * 2


@pytest.mark.parametrize(
    ("more", "expected"), [({}, {"CUDA_VISIBLE_DEVICES": "7"}), ({"SLURM_GPUS_PER_TASK": "1"}, {})]
)
def test_tasks_of_slurm_get_a_card_each(monkeypatch, more, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    task = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    task |= {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", **more}
    place = place_by_hand(mw.make_run(run_values("texts", engine="torch", launch={"kind": "processes"})), task)
    assert place is not None and place.variables == expected
    assert (place.run.launch.index, place.run.launch.workers) == (3, 4)
