"""What Slurm's variables say, and two tasks with simulated ones that train as one."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import MAIN, kill, run_values, write_corpus, write_run

import meshwright as mw
from meshwright.errors import UserError
from meshwright.launch import devices
from meshwright.launch.by_hand import place_by_hand
from meshwright.launch.slurm import expand, step_of, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[09-10,12]",
    "SLURM_JOB_NODELIST": "gpu[01-12]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b-2,c.cluster.org", ["a", "b-2", "c.cluster.org"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("n[1-2],gpu[3],m", ["n1", "n2", "gpu3", "m"]),
        ("rack[0-1]node[5,6]x", ["rack0node5x", "rack0node6x", "rack1node5x", "rack1node6x"]),
    ],
)
def test_lists_of_nodes(nodes, expected):
    assert expand(nodes) == expected


@pytest.mark.parametrize("nodes", ["", "node[1-", "node[]", "a b", "node[1-2],", "node[a]"])
def test_what_is_no_list_of_nodes(nodes):
    with pytest.raises(UserError, match="isn't a list of nodes"):
        expand(nodes)


@pytest.mark.parametrize(
    ("text", "expected"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_of_each_node(text, expected):
    assert tasks_per_node(text) == expected


def test_a_task_of_a_step():
    step = step_of(TASK)
    assert step is not None
    assert (step.rank, step.size, step.rank_here, step.size_here) == (5, 6, 1, 2)
    host, _, port = step.coordinator.partition(":")
    assert host == "gpu09"
    assert 61000 <= int(port) < 65536
    assert not step.cards_are_bound


def test_all_tasks_of_a_step_and_no_others_meet_at_a_port():
    first, another, step, job = (
        step_of({**TASK, **changes})
        for changes in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"})
    )
    assert first.coordinator == another.coordinator
    assert len({first.coordinator, step.coordinator, job.coordinator}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # in the script that sbatch runs
        {"SLURM_STEP_ID": "4294967290"},  # in the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in an allocation of several tasks
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": None},
        {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None},
    ],
)
def test_what_is_no_task_among_several(changes):
    assert step_of({key: value for key, value in {**TASK, **changes}.items() if value is not None}) is None


def test_a_variable_that_is_not_a_number():
    with pytest.raises(UserError, match="SLURM_PROCID = 'x' in the environment: must be a number"):
        step_of({**TASK, "SLURM_PROCID": "x"})


def make(**launch):
    return mw.make_run(run_values("texts", launch={"kind": "processes", **launch}))


def test_the_run_takes_its_place_from_slurm(monkeypatch):
    monkeypatch.setattr(devices, "on_cpu", lambda: True)
    place = place_by_hand(make(), TASK)
    launch = place.run.launch
    assert (launch.index, launch.workers, launch.coordinator.partition(":")[0]) == (5, 6, "gpu09")
    assert place.variables == {}
    assert place_by_hand(make(coordinator="head:7"), TASK).run.launch.coordinator == "head:7"
    assert place_by_hand(mw.make_run(run_values("texts")), TASK) is None


@pytest.mark.parametrize(("key", "given", "told"), [("workers", 4, 6), ("index", 0, 5)])
def test_the_run_file_may_not_say_something_else(key, given, told):
    with pytest.raises(UserError, match=rf"launch\.{key} = {given}: Slurm says {told}; leave the key out"):
        place_by_hand(make(**{key: given}), TASK)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"SLURM_LOCALID": "0"}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, {}),
        ({"SLURM_GPUS_PER_TASK": "2"}, {}),
        ({"SLURM_GPU_BIND": "single:1"}, {}),
        ({"SLURM_GPU_BIND": "none"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_tasks_of_a_node_share_its_cards_unless_slurm_did_it(monkeypatch, environment, expected):
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(devices, "_card_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert place_by_hand(make(), {**TASK, **environment}).variables == expected


@pytest.mark.parametrize("engine", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_two_tasks_train_as_one(tmp_path, engine):
    if engine == "torch":
        pytest.importorskip("transformers")
    write_corpus(tmp_path / "texts")
    launch = {"kind": "processes", "devices_per_worker": 1}
    values = run_values("texts", engine=engine, launch=launch, mesh={"data": 2}, train={"steps": 3})
    write_run(tmp_path / "run.toml", values)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    several = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    tasks = [
        subprocess.Popen(
            [*MAIN, "train", "run.toml"],
            cwd=tmp_path,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **job, **several, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in ("0", "1")
    ]
    try:
        (out, err), (_, err_1) = (task.communicate(timeout=100) for task in tasks)
    finally:
        for task in tasks:
            kill(task)
    assert [task.returncode for task in tasks] == [0, 0], (err, err_1)
    assert "step 3/3" in out
    assert f"engine  {engine} on 2 x cpu" in out
    assert err_1 == "worker 1 of 2: its log is runs/tiny/workers/worker_1.log\n"
    assert Path(tmp_path, "runs/tiny/run.toml").read_text().count('coordinator = "localhost:') == 1
