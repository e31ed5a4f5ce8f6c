"""Whole runs of the PyTorch engine: from Python, from the command line, in several processes; killed; exported."""

import json
import os
import re

import numpy as np
import pytest
from helpers import kill, meshwright, run_values, start_meshwright, wait_for, write_corpus, write_run

pytest.importorskip("transformers")

import meshwright as mw
from meshwright.errors import UserError

LLAMA = {"preset": "llama-tiny", "layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "ffn_width": 64}
LLAMA |= {"context_length": 64}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Stores of tokens go into the current one."""
    monkeypatch.chdir(tmp_path)


def values(folder, engine="torch", **sections):
    return run_values(write_corpus(folder / "texts"), engine=engine, **sections)


def losses(folder, name="tiny"):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records if "loss" in record}


def committed(folder, name="tiny"):
    found = folder.glob(f"runs/{name}/checkpoints/step_{'[0-9]' * 8}/manifest.json")
    return [int(path.parent.name[5:]) for path in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a random GPT-2, trained to its end by the command."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder / "run.toml", values(folder, train={"eval_every": 6, "sample_every": 12}))
    done = meshwright("train", "run.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return folder


def test_a_random_model_learns(trained):
    found = losses(trained)
    assert len(found) == 12
    assert abs(found[1][0] - np.log(257)) < 0.1  # it knows nothing yet
    assert found[12][0] < found[1][0] - 0.3
    run = mw.open_run(trained / "runs" / "tiny")
    assert len(run.evaluations()["val_loss"]) == 2
    assert len(run.samples()) == 1
    manifest = json.loads((trained / "runs/tiny/checkpoints/step_00000012/manifest.json").read_text())
    assert (manifest["engine"], manifest["parameters"]) == ("torch", 257 * 32 + 64 * 32 + 2 * 8544 + 64)


def test_the_commands_work_on_what_was_trained(trained, tmp_path):
    evaluated = meshwright("eval", "runs/tiny", cwd=trained)
    assert evaluated.returncode == 0, evaluated.stderr
    shown = float(re.search(r"val_loss +([\d.]+)", evaluated.stdout)[1])
    assert shown == pytest.approx(mw.open_run(trained / "runs" / "tiny").evaluations()["val_loss"][-1], abs=1e-3)
    written = meshwright("generate", "runs/tiny", "--prompt", "the ", "--max-tokens", "9", cwd=trained)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("the ") and len(written.stdout) > 6


def test_what_is_exported_is_proven_and_trains_in_jax(trained, tmp_path):
    done = mw.open_run(trained / "runs" / "tiny").export(tmp_path / "out")
    assert any("transformers" in line and "largest difference" in line for line in done.proof)
    theirs = {"init": f"hf:{done.path}"}
    sections = {"train": {"steps": 1}, "run_dir": str(tmp_path / "jax"), "checkpoint": {"every": 0}}
    run = mw.make_run({**values(tmp_path, "jax", **sections), "model": theirs})
    first = mw.open_run(mw.train(run).run_dir).metrics()["loss"][0]
    assert first == pytest.approx(losses(trained)[12][0], abs=0.3)  # of another batch, but after as much training


def test_a_text_is_the_same_alone_and_among_others(trained):
    run = mw.open_run(trained / "runs" / "tiny")
    together = run.generate(["the quick brown fox", "a"], max_tokens=10, temperature=0.0)
    assert [run.generate(one, max_tokens=10, temperature=0.0)[0] for one in ("the quick brown fox", "a")] == together
    drawn = [run.generate("the ", max_tokens=30, temperature=1.0, seed=seed)[0] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert run.generate("the ", max_tokens=30, temperature=5.0, top_k=1) == run.generate(
        "the ", max_tokens=30, temperature=0.0
    )


def killed(folder, workers):
    """Train with a kill after each save, until the end; how often it was killed."""
    kills = 0
    for target in (4, 8):
        process = start_meshwright("train", "run.toml", cwd=folder)
        try:
            wait_for(lambda: target in committed(folder), process)  # noqa: B023
        finally:
            kill(process)
        kills += 1
    done = meshwright("train", "run.toml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return kills


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_anywhere_goes_on_bit_for_bit(tmp_path, workers):
    launch = {"kind": "processes", "workers": 2} if workers == 2 else {}
    more = {"model": LLAMA, "launch": launch, "mesh": {"data": 1, "fsdp": -1}, "checkpoint": {"every": 4, "keep": 9}}
    more["train"] = {"steps": 40, "micro_batch_size": 2}
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "run.toml", values(tmp_path / name, name="tiny", **more))
    done = meshwright("train", "run.toml", cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    if workers == 2:
        assert "2 x cpu, float32; fsdp 2" in done.stdout
    assert killed(tmp_path / "broken", workers) == 2
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 40


def test_a_run_of_replicas_in_bfloat16_is_evaluated_and_exported(tmp_path):
    more = {"launch": {"kind": "processes", "workers": 2}, "mesh": {"data": 2}}
    train = {"compute_dtype": "bfloat16", "micro_batch_size": 2, "eval_every": 6}
    write_run(tmp_path / "run.toml", values(tmp_path, **more, train=train))
    done = meshwright("train", "run.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 x cpu, bfloat16; data 2" in done.stdout
    found = losses(tmp_path)
    assert found[12][0] < found[1][0] - 0.3
    run = mw.open_run(tmp_path / "runs" / "tiny")
    recorded, evaluated = run.evaluations()["val_loss"][-1], run.evaluate()["val_loss"]
    assert evaluated == pytest.approx(recorded, abs=1e-5)
    exported = run.export(tmp_path / "out")
    assert any("transformers" in line and "largest difference" in line for line in exported.proof)


@pytest.mark.slow
def test_a_state_is_gone_on_from_on_another_mesh_and_seen_to_be(tmp_path):
    more = {"model": LLAMA, "checkpoint": {"every": 6}}
    write_run(tmp_path / "run.toml", values(tmp_path, **more, train={"steps": 6}))
    assert meshwright("train", "run.toml", cwd=tmp_path).returncode == 0
    two = ["launch.kind=processes", "launch.workers=2", "mesh.data=1", "mesh.tensor=2", "train.steps=12"]
    done = meshwright("train", "run.toml", *two, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    write_run(tmp_path / "other.toml", values(tmp_path, name="other", **more, train={"steps": 6}))
    assert meshwright("train", "other.toml", cwd=tmp_path).returncode == 0
    assert meshwright("train", "other.toml", "train.steps=12", cwd=tmp_path).returncode == 0
    one, other = losses(tmp_path), losses(tmp_path, "other")
    assert one.keys() == other.keys() == set(range(1, 13))
    for step, pair in one.items():
        assert pair == pytest.approx(other[step], rel=1e-5)
    assert list(one.values())[6:] != list(other.values())[6:]  # not the same computation


def test_a_run_starts_from_another_of_its_engine_alone(trained, tmp_path):
    base = str(trained / "runs" / "tiny")
    run = mw.make_run(values(tmp_path, name="next", run_dir=str(tmp_path / "next"), model={"preset": "", "init": base}))
    first = mw.train(run)
    assert mw.open_run(first.run_dir).metrics()["loss"][0] < 5.4  # log(257) is 5.55
    run = run.model_copy(update={"engine": "jax", "run_dir": str(tmp_path / "jax")})
    with pytest.raises(UserError, match=r'trained with engine = "torch".*meshwright export'):
        mw.train(run)


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    from meshwright.engines.torch.engine import TorchEngine

    run = mw.make_run(values(tmp_path))
    spec = run.model.spec.model_copy(update={"vocab_size": 257})
    engine = TorchEngine(run, spec)
    before = {path: engine.on_host().read(path, ()) for path in engine.on_host().shapes}
    (tmp_path / "state").mkdir()
    other = TorchEngine(run.model_copy(update={"seed": 1}), spec)
    other.save(tmp_path / "state")()
    whole = TorchEngine(run, spec)
    whole.restore(tmp_path / "state")
    for path in before:
        np.testing.assert_array_equal(whole.on_host().read(path, ()), other.on_host().read(path, ()))
    (file,) = (tmp_path / "state").glob("state/*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(Exception):  # noqa: B017  (whatever DCP raises)
        engine.restore(tmp_path / "state")
    for path, value in before.items():
        np.testing.assert_array_equal(engine.on_host().read(path, ()), value)


def test_a_state_of_another_shape_is_named(tmp_path):
    from meshwright.engines.torch.engine import TorchEngine

    run = mw.make_run(values(tmp_path))
    TorchEngine(run, run.model.spec.model_copy(update={"vocab_size": 257})).save(tmp_path)()
    other = TorchEngine(run, run.model.spec.model_copy(update={"vocab_size": 300}))
    with pytest.raises(UserError, match=r"wte\.weight: shape \(257, 32\) in the checkpoint, shape \(300, 32\)"):
        other.restore(tmp_path)
    lion = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"kind": "lion"})})
    (tmp_path / "lion").mkdir()
    TorchEngine(lion, run.model.spec.model_copy(update={"vocab_size": 257})).save(tmp_path / "lion")()
    with pytest.raises(UserError, match=r"optimizer\.square\..*no such tensor.*give the optimizer"):
        TorchEngine(run, run.model.spec.model_copy(update={"vocab_size": 257})).restore(tmp_path / "lion")
