"""`meshwright plan`, and the refusal of a run that doesn't fit: numbers against the arrays of a real engine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers import MAIN, meshwright, run_values, virtual_devices, write_corpus, write_run

import meshwright as mw
from meshwright import api
from meshwright.engines.jax.estimate import human_bytes
from meshwright.errors import UserError
from meshwright.models.decoder import parameter_count

MODEL = {"vocab_size": 61, "layers": 4, "heads": 4, "kv_heads": 4}
TRAIN = {"batch_size": 16, "scan_layers": True}
EIGHT = virtual_devices(8)

MESHES = {
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "pipeline": {"data": 4, "pipeline": 2, "pipeline_rounds": 2},
}

# For each mesh the plan, then a real engine; the step is compiled for one plan alone, to save time.
COMPARE = """
import json, sys
import jax
import meshwright as mw
from meshwright import api
from meshwright.engines.jax import memory_check
from meshwright.engines.jax.engine import JaxEngine

memory_check.device_memory = lambda processes=1: None
found = {}
for name, values in json.load(sys.stdin).items():
    run = mw.make_run(values)
    plan = api.plan(run, compiled=name == "fsdp")
    alive = len(jax.live_arrays())
    state = JaxEngine(run, run.model.spec)._state
    sizes = {
        part: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for part, tree in (("parameters", state.params), ("optimizer", (state.step, state.optimizer)))
    }
    sizes["whole"] = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    planned = {
        "parameters": plan.estimate.parameters,
        "optimizer": plan.estimate.optimizer,
        "whole": plan.checkpoint_bytes,
    }
    found[name] = {
        "alive": alive,
        "sizes": sizes,
        "planned": planned,
        "gradients": plan.estimate.gradients,
        "count": plan.parameters_per_device,
        "bubble": plan.bubble,
        "ratio": plan.xla_bytes / plan.estimate.total if plan.xla_bytes else None,
        "text": str(plan),
    }
    del state
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def eight():
    train = {**TRAIN, "micro_batch_size": 8}
    values = {name: run_values("none", model=MODEL, mesh=mesh, train=train) for name, mesh in MESHES.items()}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        input=json.dumps(values),
        env={**os.environ, "JAX_PLATFORMS": "cpu", **EIGHT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MESHES)
def test_bytes_of_a_device_are_those_of_real_arrays(name, eight):
    assert eight[name]["alive"] == 0
    assert eight[name]["planned"] == eight[name]["sizes"]
    assert eight[name]["count"] * 4 == eight[name]["planned"]["parameters"]


def test_what_meshes_cut(eight):
    count = parameter_count(mw.make_run(run_values("none", model=MODEL)).model.spec)
    norms_and_biases = 4 * (4 * 32 + 3 * 32 + 64) + 2 * 32  # not cut along fsdp; of the other biases, see below
    outputs = 4 * 2 * 32  # biases of the last kernels of both halves: their axis is the width
    matrices = count - norms_and_biases - outputs
    assert eight["fsdp"]["count"] == matrices // 8 + outputs // 8 + norms_and_biases
    text = eight["fsdp"]["text"]
    assert "  fsdp 8           cuts parameters along width; activations along batch\n" in text
    assert (
        "cuts parameters along vocab, heads, kv_heads, ffn; activations along sequence, heads, ffn"
        in (eight["tensor"]["text"])
    )
    assert eight["fsdp"]["gradients"] == 2 * eight["fsdp"]["planned"]["parameters"]
    assert 1 / 1.2 < eight["fsdp"]["ratio"] < 1.2


def test_the_bubble_of_a_pipeline(eight):
    assert eight["pipeline"]["bubble"] == pytest.approx(1 / 5)  # 2 stages; 2 micro-batches go round twice
    text = eight["pipeline"]["text"]
    assert "20.0% of a stage's time: (2 - 1) / (2 micro-batches x 2 + 2 - 1)" in text
    assert "cuts parameters along layers; activations along loss time" in text
    assert "bubble" not in eight["fsdp"]["text"]


def test_one_device_by_hand():
    run = mw.make_run(run_values("none", model=MODEL, train=TRAIN))
    before = len(jax.live_arrays())
    plan = api.plan(run)
    assert len(jax.live_arrays()) <= before  # of other tests some may go just now
    count = parameter_count(run.model.spec)
    assert plan.state.parameters == plan.parameters_per_device == count
    assert plan.estimate.parameters == plan.estimate.gradients == 4 * count
    assert (
        plan.estimate.optimizer == 8 * count + 3 * 4
    )  # two moments; the counters of the run, of AdamW, of the schedule
    assert plan.checkpoint_bytes == plan.estimate.state
    assert plan.tokens_per_step == 16 * 32
    assert 1 / 1.2 < plan.xla_bytes / plan.estimate.total < 1.2
    text = str(plan)
    assert f"{count:,}; {count:,} on each device" in text
    assert f"6 x {count - 64 * 32:,} parameters + 12 x 4 layers x 4 heads x (8 + 8) / 2 x 32 tokens" in text
    assert "16 sequences of 32 = 512 tokens a step\n" in text
    assert " fits the " in text.splitlines()[-1]
    assert "\n  kernels" in text and "mesh" not in text


def vocabulary(**sections) -> int:
    return api.plan(mw.make_run(run_values("none", **sections)), compiled=False).spec.vocab_size


def test_the_vocabulary_is_known_without_data(tmp_path):
    assert vocabulary() == 257
    assert vocabulary(tokenizer={"kind": "bpe", "vocab_size": 300}) == 300
    assert vocabulary(model={"vocab_size": 512}) == 512
    run = mw.make_run(run_values(write_corpus(tmp_path / "texts"), data={"store": str(tmp_path / "store")}))
    api.prepare(run)
    assert vocabulary(tokenizer={"kind": "bpe"}, data={"train": str(tmp_path / "store")}) == 257
    with pytest.raises(UserError, match=r"tokenizer.kind = 'byte': not a ready-made tokenizer"):
        vocabulary(tokenizer={"kind": "byte"})


def test_devices_that_are_not_here():
    mesh, train = {"fsdp": 16, "tensor": 2}, {"batch_size": 32}
    plan = api.plan(mw.make_run(run_values("none", model=MODEL, mesh=mesh, train=train)), devices=64)
    assert plan.mesh.sizes["data"] == 2
    assert plan.xla_bytes is plan.memory is None
    assert "  total            not available: the run has 64 devices, here there is 1" in str(plan)
    assert "devices          64 (here: 1 x cpu), in 1 process" in str(plan)
    assert 'computes in      float32, as on CPUs; for accelerators set train.compute_dtype = "bfloat16"' in str(plan)
    launched = mw.make_run(run_values("none", launch={"kind": "processes", "workers": 2, "devices_per_worker": 2}))
    assert "4 (here: 1 x cpu), in 2 processes" in str(api.plan(launched))


@pytest.fixture
def here(tmp_path):
    write_run(tmp_path / "run.toml", run_values("none", model=MODEL, train=TRAIN))
    return tmp_path


def test_the_command(here):
    done = meshwright("plan", "run.toml", "--devices", 64, "mesh.fsdp=8", "mesh.data=2", "mesh.tensor=4", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan of tiny\n  devices          64 (here: 1 x cpu), in 1 process\n")
    assert [path.name for path in here.iterdir()] == ["run.toml"]
    done = meshwright("plan", "run.toml", "--no-compile", "mesh.data=1", "mesh.fsdp=3", cwd=here)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == (
        "error: mesh: fsdp 3 = 3 devices, but there are 1; change a size, or set one to -1 (what is left)"
    )
    done = meshwright("plan", "run.toml", "--devices", 32, "--no-compile", cwd=here)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: train.micro_batch_size = 16: must be a multiple of mesh data 32")


def test_help_shows_an_example_and_imports_no_framework(tmp_path):
    code = (
        "import sys\nfrom meshwright.cli import main\ntry:\n    main(['plan', '--help'], prog_name='meshwright')\n"
        "except SystemExit as end:\n    assert not end.code\nassert not {'jax', 'flax', 'optax'} & set(sys.modules)"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
    assert "Example:\n    meshwright plan examples/stdlib.toml" in shown


def test_a_model_too_large_is_refused_at_once_and_never_allocated(tmp_path):
    write_corpus(tmp_path / "texts")
    model = {"preset": "llama-1b", "layers": 40_000, "width": 2048, "heads": 32, "ffn_width": 8192}
    values = run_values("texts", model=model)
    state = api.plan(mw.make_run(values), compiled=False).estimate.state
    assert state > 25 * 2**40
    write_run(tmp_path / "run.toml", values)
    started = time.monotonic()
    # A process's peak counts what it was forked from, so a small one must stand between it and these tests.
    measured = "import resource, subprocess, sys\ncode = subprocess.call(sys.argv[1:])\n"
    measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\nsys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", measured, *MAIN, "train", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    errors, peak_kib = done.stderr, int(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert errors.startswith(f"error: mesh.fsdp = 1: parameters and optimizer state alone take {human_bytes(state)} on")
    for part in ("device, which has", "or more, with as many devices, or make", "gradients", "activations"):
        assert part in errors
    assert len(errors.strip().splitlines()) == 1
    assert peak_kib < 1.5 * 2**20
    assert time.monotonic() - started < 60
    assert not list(Path(tmp_path, "runs", "tiny").glob("checkpoints/*"))
