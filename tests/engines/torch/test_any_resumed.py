"""Models of `transformers` that are of none of Meshwright's families: gone on with on a mesh, bit for bit."""

import signal

import pytest
from helpers import kill, meshwright, run_values, start_meshwright, wait_for, write_corpus, write_run

pytest.importorskip("transformers")

from families import theirs

import meshwright as mw

_CODEGEN = {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4}
_STEPS = 48


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model = theirs("codegen", **_CODEGEN)
    model.resize_token_embeddings(257)
    model.save_pretrained(folder)
    return folder


def broken_off(folder, how: str) -> int:
    """Train until a checkpoint is there and end that; the step of the newest one."""
    process = start_meshwright("train", "run.toml", cwd=folder)
    try:
        wait_for((folder / "runs/tiny/checkpoints/step_00000008/manifest.json").exists, process)
        if how == "stopped":
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        kill(process)
    return max(int(path.parent.name[5:]) for path in folder.glob("runs/tiny/checkpoints/step_*[0-9]/manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "source", "how"), [("data", "init", "killed"), ("fsdp", "config", "stopped")])
def test_a_mesh_goes_on_bit_for_bit(base, tmp_path, axis, source, how):
    sections = {
        "engine": "torch",
        "mesh": {"data": 1, axis: 2},
        "launch": {"kind": "processes", "workers": 2},
        "train": {"steps": _STEPS, "eval_every": _STEPS // 2},
        "checkpoint": {"every": 8, "keep": 9},
    }
    for name in ("whole", "broken"):
        texts = write_corpus(tmp_path / name / "texts")
        write_run(tmp_path / name / "run.toml", run_values(texts, **sections) | {"model": {source: f"hf:{base}"}})
    done = meshwright("train", "run.toml", cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 x cpu, float32; {axis} 2" in done.stdout
    step = broken_off(tmp_path / "broken", how)
    again = meshwright("train", "run.toml", cwd=tmp_path / "broken")
    assert again.returncode == 0, again.stdout + again.stderr
    assert 8 <= step < _STEPS and f"resuming at step {step}/{_STEPS}" in again.stdout
    one, other = (mw.open_run(tmp_path / name / "runs/tiny") for name in ("whole", "broken"))
    for key in ("loss", "grad_norm"):
        assert other.metrics()[key].tolist() == one.metrics()[key].tolist()
    assert other.evaluations()["val_loss"].tolist() == one.evaluations()["val_loss"].tolist()
    losses = one.metrics()["loss"]
    assert len(losses) == _STEPS and losses[-1] < losses[0] - 0.1
