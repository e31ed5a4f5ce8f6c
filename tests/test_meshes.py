"""Whole runs on meshes, in one process and in several: the same training as on one device, whatever befalls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import kill, meshwright, run_values, start_meshwright, virtual_devices, wait_for, write_corpus, write_run

import meshwright as mw
from meshwright.checkpoints import Checkpoints

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]

ROOT = Path(__file__).parents[1]
STEPS, EVALUATED = 24, [8, 16, 24]
RUN = run_values(
    "texts",
    model={"dropout": 0.1},
    mesh={"data": 1, "fsdp": 2, "tensor": 2},
    launch={"kind": "processes", "workers": 2, "devices_per_worker": 2},
    train={
        "steps": STEPS,
        "batch_size": 8,
        "micro_batch_size": 4,
        "sequence_length": 16,
        "log_every": 1,
        "eval_every": 8,
        "eval_batches": 3,
        "sample_every": STEPS,
        "scan_layers": True,
    },
    checkpoint={"every": 4, "keep": 3},
)
IN_TWO = "  engine  jax on 4 x cpu, float32; fsdp 2 x tensor 2"
LOCAL = ("launch.kind=local", "launch.workers=1", "mesh.tensor=1")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with texts and a run file for two processes; no process that was started in it may be left there."""
    folder = tmp_path_factory.mktemp("meshes").resolve()
    write_corpus(folder / "texts")
    write_run(folder / "run.toml", RUN)
    return folder


@pytest.fixture(autouse=True)
def none_is_left(here):
    yield
    assert processes_in(here) == []


def processes_in(folder: Path) -> list[int]:
    """Those whose current folder it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if os.readlink(link) == str(folder):
                found.append(int(link.parent.name))
    return found


def worker_of(launcher: int, rank: int) -> int:
    """The process of a worker, among the children of its launcher."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            arguments = stat.with_name("cmdline").read_text().rstrip("\0").split("\0")
            if parent == launcher and arguments[-4] == str(rank) and arguments[-1] == str(launcher):
                return int(stat.parent.name)
    raise AssertionError(f"process {launcher} has no worker {rank}")


def train(folder: Path, name: str, *overrides: str, run_file: Path | str = "run.toml") -> Path:
    """Train to the end; returns the run directory."""
    done = meshwright("train", run_file, f"run_dir=runs/{name}", *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name


def records(run_dir: Path, key: str) -> list[tuple[int, float]]:
    """Steps and values of the records that have a key, in the order of the file."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def values(run_dir: Path, key: str) -> list[float]:
    return [value for _, value in records(run_dir, key)]


def step_reached(run_dir: Path) -> int:
    try:
        return max((step for step, _ in records(run_dir, "loss")), default=0)
    except (OSError, ValueError):
        return 0


def log(run_dir: Path) -> str:
    path = run_dir / "log.txt"
    return path.read_text() if path.exists() else ""


def assert_same_training(run_dir: Path, other: Path) -> None:
    """Every loss of both, to float32's rounding."""
    for key in ("loss", "val_loss"):
        assert [step for step, _ in records(run_dir, key)] == [step for step, _ in records(other, key)]
        assert values(run_dir, key) == pytest.approx(values(other, key), rel=1e-5)


@pytest.fixture(scope="module")
def unbroken(here):
    """The run in two processes of two devices each, from start to end."""
    return train(here, "unbroken")


@pytest.fixture(scope="module")
def moved(here, unbroken):
    """The run in two processes up to step 16, then on four devices of one process."""
    folder = shutil.copytree(unbroken, here / "runs/moved")
    for step in (20, 24):
        shutil.rmtree(folder / f"checkpoints/step_{step:08d}")
    return train(here, "moved", *LOCAL, "mesh.fsdp=4", "launch.devices_per_worker=4")


def test_two_processes_train_as_one_device_does(here, unbroken):
    alone = train(here, "alone", *LOCAL, "mesh.fsdp=1", "launch.devices_per_worker=1")
    assert IN_TWO in log(unbroken)
    assert "  engine  jax on cpu, float32\n" in log(alone)
    assert_same_training(unbroken, alone)
    losses = values(unbroken, "loss")
    assert len(set(losses)) == STEPS and losses[-1] < 0.9 * losses[0]


def test_two_processes_write_a_run_directory_once(unbroken):
    assert [step for step, _ in records(unbroken, "loss")] == list(range(1, STEPS + 1))
    assert [step for step, _ in records(unbroken, "val_loss")] == EVALUATED
    assert len((unbroken / "samples.jsonl").read_text().splitlines()) == 1
    assert log(unbroken).count("  engine  ") == 1
    assert log(unbroken).count(f"step {STEPS}/{STEPS}") == 3  # trained, evaluated, sampled
    assert (unbroken / "report.html").stat().st_size > 1000
    said_by_worker_1 = (unbroken / "workers/worker_1.log").read_text()
    assert said_by_worker_1.startswith("--- ") and "step 1/" not in said_by_worker_1
    assert not (unbroken / "workers/worker_0.log").exists()
    assert saved_by_both(unbroken) == [16, 20, 24]


def saved_by_both(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that hold something from each of two processes."""
    return [
        checkpoint.step
        for checkpoint in Checkpoints(run_dir / "checkpoints", 3).committed()
        if all(list((checkpoint.folder / "state" / f"ocdbt.process_{rank}/d").iterdir()) for rank in (0, 1))
    ]


@pytest.mark.slow
def test_killed_then_stopped_goes_on_bit_for_bit(here, unbroken):
    command, run_dir = ("train", "run.toml", "run_dir=runs/broken"), here / "runs/broken"

    process = start_meshwright(*command, cwd=here)
    try:
        wait_for(lambda: step_reached(run_dir) >= 6, process)
        worker = worker_of(process.pid, 1)
        os.kill(worker, signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    finally:
        kill(process)
    assert process.returncode == 1
    assert f"error: worker 1 (process {worker}) was killed by SIGKILL" in err
    assert processes_in(here) == []
    saved = saved_by_both(run_dir)[-1]
    assert 4 <= saved < 14

    process = start_meshwright(*command, cwd=here)
    try:
        wait_for(lambda: "resuming at" in log(run_dir) and step_reached(run_dir) >= 14, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert f"resuming at step {saved}/{STEPS}" in out
    stopped = saved_by_both(run_dir)[-1]  # a state that both hold: they stopped at the same step
    assert 14 <= stopped == step_reached(run_dir) < STEPS
    assert f"stopped after step {stopped} and saved; the same command goes on from there" in out

    train(here, "broken")
    assert f"resuming at step {stopped}/{STEPS}" in log(run_dir)
    assert log(run_dir).count(IN_TWO) == 3
    for key in ("loss", "grad_norm", "val_loss", "tokens"):
        assert records(run_dir, key) == records(unbroken, key)
    assert (run_dir / "samples.jsonl").read_bytes() == (unbroken / "samples.jsonl").read_bytes()


def test_a_run_goes_on_on_another_mesh(moved, unbroken):
    assert "resuming at step 16/24" in log(moved)
    assert "  engine  jax on 4 x cpu, float32; fsdp 4\n" in log(moved)
    assert_same_training(moved, unbroken)
    seconds, before = values(moved, "step_seconds"), values(unbroken, "step_seconds")
    assert seconds[:15] == before[:15] and not set(seconds[15:]) & set(before)  # the last steps are not those copied


OPEN = """
import json, sys
import jax
import meshwright as mw
from meshwright.cli import main
run_dir, prompt = sys.argv[1:]
main(["eval", run_dir], standalone_mode=False)
main(["generate", run_dir, "--prompt", prompt, "--max-tokens", "5"], standalone_mode=False)
trained = mw.open_run(run_dir)
found = {
    "devices": jax.device_count(),
    "trained on": trained.run.launch.devices_per_worker,
    "val_loss": trained.evaluate()["val_loss"],
    "sample": trained.generate("", max_tokens=15, seed=trained.run.seed)[0],
}
print(json.dumps(found))
"""


def test_a_run_of_four_devices_opens_on_one(here, moved):
    command = [sys.executable, "-c", OPEN, "runs/moved", "the old "]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown, _, last = done.stdout.rstrip("\n").rpartition("\n")
    found = json.loads(last)
    assert (found["devices"], found["trained on"]) == (1, 4)
    logged = values(moved, "val_loss")[-1]
    assert found["val_loss"] == pytest.approx(logged, rel=1e-5)
    assert f"val_loss           {logged:.4f}\n" in shown
    assert "\nthe old " in shown
    assert found["sample"] == json.loads((moved / "samples.jsonl").read_text().splitlines()[-1])["text"]


def test_the_example_in_three_dimensions(here):
    """`examples/moe-3d.toml` as it is, but smaller."""
    small = (
        *("data.train=texts", "data.validation=0.2", "tokenizer.kind=bytes", "schedule.warmup_steps=2"),
        *("train.steps=6", "train.log_every=1", "train.eval_every=6", "train.eval_batches=2", "train.sample_every=0"),
        *("train.sequence_length=32", "model.width=32", "model.ffn_width=32", "model.head_width=8"),
        *("model.rotary_width=4", "model.kv_latent=16", "model.query_latent=16"),
    )
    one = ("mesh.data=1", "mesh.pipeline=1", "mesh.tensor=1", "launch.devices_per_worker=1")
    example = ROOT / "examples/moe-3d.toml"
    cut, whole = train(here, "3d", *small, run_file=example), train(here, "3d-one", *small, *one, run_file=example)
    assert "  engine  jax on 8 x cpu, float32; pipeline 2 x data 2 x tensor 2\n" in log(cut)
    assert "  engine  jax on cpu, float32\n" in log(whole)
    run = mw.load_run(cut / "run.toml")
    assert (run.model.attention, run.model.experts, run.train.batch_size // run.micro_batch_size) == ("latent", 4, 4)
    assert_same_training(cut, whole)
    assert len(set(values(cut, "loss"))) == 6
    loads = [values(cut, f"expert_load/{expert}") for expert in range(4)]
    for of_a_step in zip(*loads, strict=True):
        assert sum(of_a_step) == pytest.approx(1, abs=1e-6)
        assert len(set(of_a_step)) > 1
    assert values(cut, "dropped") == [0] * 6
    for key in ("expert_load/0", "expert_load_max", "router_penalty"):
        assert values(cut, key) == pytest.approx(values(whole, key), rel=1e-4)


INITIAL = """
import json
import jax
import meshwright as mw
from meshwright.engines.jax.program import Program
from meshwright.models.decoder import Decoder
run = mw.make_run({
    "data": {"train": "x"},
    "model": {"preset": "llama-tiny", "layers": 4, "width": 128, "heads": 4, "kv_heads": 4, "head_width": 32,
              "ffn_width": 512, "vocab_size": 4096},
    "mesh": {"data": 1, "fsdp": jax.device_count()},
    "train": {"batch_size": 8, "sequence_length": 16, "scan_layers": True},
})
program = Program(run, run.model.spec, model=Decoder)
whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state.shapes))
memory = program.make_state.compile().memory_analysis()
print(json.dumps([whole, memory.temp_size_in_bytes, memory.output_size_in_bytes]))
"""


def initial_memory(fsdp: int) -> tuple[int, int, int]:
    """Bytes of the whole state, and a device's temporary and output bytes in the making of it."""
    done = subprocess.run(
        [sys.executable, "-c", INITIAL],
        env={**os.environ, **virtual_devices(fsdp)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_no_device_ever_holds_the_whole_initial_state():
    whole, temporary, output = initial_memory(8)
    assert whole > 15e6
    assert output < whole / 7.5
    assert temporary + output < whole / 5
    alone, temporary, output = initial_memory(1)
    assert alone == whole
    assert output >= whole
    assert temporary + output < 1.5 * whole


CAUSALITY = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from cases import BATCH, TIME, VOCAB, Layout
from jobs import make_engine
from meshwright.data.examples import Batch
found = {}
for mesh in ({"context": 4}, {"pipeline": 2, "context": 2}):
    engine = make_engine("llama", Layout("", mesh), 2, tied_embeddings=False, layers=2)
    random = np.random.default_rng(0)
    tokens = random.integers(TIME, VOCAB, (BATCH, TIME)).astype(np.int32)
    row = BATCH // 2 + 1
    tokens[row] = random.permutation(TIME)
    rows = {}
    for place in json.loads(sys.argv[2]):
        weights = np.zeros((BATCH, TIME), np.float32)
        weights[row, place] = 1
        values = engine.train_step(Batch(tokens, np.roll(tokens, -1, axis=1), weights))
        assert float(values["tokens"]) == 1
        gradient = np.asarray(engine._state.optimizer[0]["gradients"]["embedding"])
        seen = np.flatnonzero(np.any(gradient != 0, axis=1)).tolist()
        rows[place] = [seen, sorted(tokens[row, : place + 1].tolist())]
    found[engine.description.partition("; ")[2]] = rows
print(json.dumps(found))
"""


def test_no_gradient_flows_to_what_comes_later():
    """Of a loss at one place, on meshes that cut time: exactly none to later tokens, nor to other sequences."""
    places = [0, 2, 5, 8, 11, 15]
    done = subprocess.run(
        [sys.executable, "-c", CAUSALITY, str(Path(__file__).parent / "parity"), json.dumps(places)],
        env={**os.environ, **virtual_devices(4)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["context 4", "pipeline 2 x context 2"]
    for mesh, rows in found.items():
        assert [int(place) for place in rows] == places
        for place, (seen, expected) in rows.items():
            assert seen == expected, f"{mesh}, place {place}"
            assert len(expected) == int(place) + 1
