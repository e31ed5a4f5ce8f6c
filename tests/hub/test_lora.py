"""LoRA runs from end to end: what is trained, kept, gone on from and exported; and what is refused."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from glass import write_glass
from helpers import kill, start_meshwright, wait_for
from runs import started, still_run
from virtual import measured_on_eight_devices

import meshwright as mw
from meshwright.checkpoints import Checkpoints, check_identity
from meshwright.cli import main
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.errors import UserError
from meshwright.hub import write
from meshwright.models.spec import preset
from meshwright.models.targets import ALL, adapters_of
from meshwright.resuming import run_identity
from meshwright.track.metrics import read_metrics

LORA = {"rank": 4, "alpha": 8.0}
LEARNS = {"optimizer": {"learning_rate": 3e-3}, "schedule": {"kind": "constant"}}
ADAPTERS = 4 * 4 * (2 * 128 + 2 * (128 + 64) + 2 * 128 + 3 * (128 + 341))  # layers, rank; q, k and v, o, the MLP


def lora_run(folder, name, init, *, steps=4, every=2, **more):
    sections = {"lora": LORA, "checkpoint": {"every": every, "keep": 9}, **LEARNS, **more}
    sections["train"] = {"steps": steps, **sections.get("train", {})}
    return still_run(folder, name, init, **sections)


def state_of(run_dir, step):
    """The arrays of a checkpoint, as they lie on disk."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore((run_dir / f"checkpoints/step_{step:08}/state").absolute())


def export(trained, out, *options):
    """The command's exit code."""
    with pytest.raises(SystemExit) as end:
        main(["export", str(trained.run_dir), str(out), *options], prog_name="meshwright")
    return end.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the base."""
    folder = tmp_path_factory.mktemp("lora")
    write_glass(folder / "glass")
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return mw.train(lora_run(folder, "trained", f"hf:{folder / 'glass'}"))


def test_just_the_adapters_are_trained_and_kept(trained, folder):
    log = (trained.run_dir / "log.txt").read_text()
    assert f"852,608 parameters; LoRA trains {ADAPTERS:,} more ({ADAPTERS / 852_608:.2%})" in log
    manifest = json.loads((trained.run_dir / "checkpoints/step_00000004/manifest.json").read_text())
    assert (manifest["parameters"], manifest["trained_parameters"]) == (852_608, ADAPTERS)
    assert manifest["base"] == f"hf:{folder / 'glass'}"
    state = state_of(trained.run_dir, 4)
    counts = {"params": 0, "optimizer": 0}
    for name, array in state.items():
        if ".lora." in name:
            counts[name.split(".")[0]] += array.size
    assert counts == {"params": ADAPTERS, "optimizer": 2 * ADAPTERS}
    assert all(".lora." in name for name in state if name.startswith("params."))
    assert sum(array.size for array in state.values()) < 3 * ADAPTERS + 16


def test_the_base_stays_as_it_is_bit_for_bit(trained, folder):
    base = started(still_run(folder, "base", f"hf:{folder / 'glass'}"))
    before, after = base.on_host(), mw.open_run(trained.run_dir).engine.adapters_on_host()
    assert before.shapes.keys() == {path for path in after.shapes if ".lora." not in path}
    for path in before.shapes:
        np.testing.assert_array_equal(before.read(path, ()), after.read(path, ()))
    changed = [path for path in after.shapes if path.endswith(".lora.b") and np.any(after.read(path, ()))]
    assert len(changed) == 7


def test_adapters_start_as_pefts_do(folder):
    run = lora_run(folder, "fresh", f"hf:{folder / 'glass'}")
    engine, again = started(run), started(run)
    host = engine.adapters_on_host()
    for path, shape in host.shapes.items():
        value = host.read(path, ())
        np.testing.assert_array_equal(value, again.adapters_on_host().read(path, ()))
        if path.endswith(".lora.b"):
            assert not value.any()
        if path.endswith(".lora.a"):
            bound = 1 / math.sqrt(shape[1])
            assert 0.9 * bound < np.abs(value).max() <= bound
            assert np.std(value) == pytest.approx(bound / math.sqrt(3), rel=0.1)
            assert not np.array_equal(value[0], value[1])


def losses_of(run_dir):
    return {record["step"]: record["loss"] for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record}


def test_killed_while_saving_it_goes_on_bit_for_bit(folder):
    more = {"steps": 24, "every": 4, "model": {"dropout": 0.1}, "train": {"log_every": 1, "eval_every": 0}}
    whole, broken = (lora_run(folder, name, f"hf:{folder / 'glass'}", **more) for name in ("whole", "broken"))
    (folder / "broken.toml").write_text(broken.to_toml(), encoding="utf-8")
    checkpoints = Checkpoints(broken.directory / "checkpoints", 9)
    process = start_meshwright("train", folder / "broken.toml", cwd=folder)
    try:
        wait_for((checkpoints.folder / "step_00000012.partial").exists, process, timeout=120)
    finally:
        kill(process)
    assert 4 <= checkpoints.committed()[-1].step < 24
    mw.train(broken)
    mw.train(whole)
    assert losses_of(broken.directory) == losses_of(whole.directory)
    assert len(set(losses_of(whole.directory).values())) == 24
    once, twice = state_of(whole.directory, 24), state_of(broken.directory, 24)
    assert once.keys() == twice.keys()
    assert all(np.array_equal(once[name], twice[name]) for name in once)


def test_adapters_of_the_average_under_schedule_free(folder):
    """What is evaluated, exported and opened again is the average of the adapters, and the base."""
    optimizer = {"kind": "schedule_free", "learning_rate": 0.03}
    outcome = mw.train(lora_run(folder, "averaged", f"hf:{folder / 'glass'}", optimizer=optimizer))
    opened = mw.open_run(outcome.run_dir)
    assert opened.evaluate()["val_loss"] == pytest.approx(outcome.evaluation["val_loss"], abs=1e-6)
    training = state_of(outcome.run_dir, 4)["params.blocks.mlp.up.lora.b"]
    assert not np.array_equal(opened.engine.adapters_on_host().read("blocks.mlp.up.lora.b", ()), training)


@pytest.fixture(scope="module")
def merged(trained, folder):
    """The folder of the whole model."""
    assert export(trained, folder / "merged") == 0
    return folder / "merged"


def test_merged_and_as_adapters_it_is_proven(trained, merged, tmp_path, capsys):
    assert export(trained, tmp_path / "adapter", "--adapter") == 0
    shown = capsys.readouterr().out
    assert "each pair makes what the run's adapter adds" in shown
    card = (tmp_path / "adapter/README.md").read_text(encoding="utf-8")
    assert "library_name: peft\nbase_model: " in card and f"{ADAPTERS:,} parameters of rank 4, alpha 8" in card
    assert "LoRA" in (merged / "README.md").read_text(encoding="utf-8")


def test_it_is_evaluated_and_generates_as_the_merged_model_and_not_as_the_base(trained, merged, folder):
    inits = {"merged-run": merged, "base-run": folder / "glass"}  # each as a run that changes nothing
    still = [still_run(folder, name, f"hf:{init}", train={"steps": 1}) for name, init in inits.items()]
    three = [mw.open_run(folder) for folder in (trained.run_dir, *(mw.train(run).run_dir for run in still))]
    losses = [one.evaluate()["val_loss"] for one in three]
    assert losses[0] == pytest.approx(trained.evaluation["val_loss"], abs=1e-6)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] < losses[2] - 0.01
    prompts = ["It was", "The old man", "In the town there were"]
    texts = [one.generate(prompts, max_tokens=24, temperature=0.0) for one in three]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    ids_BT = np.arange(64, dtype=np.int32).reshape(2, 32)
    logits = [one.engine.logits(ids_BT) for one in three]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 < 1e-2 < np.abs(logits[0] - logits[2]).max()


def test_an_adapter_that_is_another_is_caught(trained, tmp_path, monkeypatch):
    from safetensors.numpy import load_file, save_file

    real = write.write_adapter

    def wrong(folder, *arguments):
        real(folder, *arguments)
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        name = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"
        save_file({**tensors, name: tensors[name][::-1].copy()}, path)

    monkeypatch.setattr(write, "write_adapter", wrong)
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.q_proj.* don't make what the run's adapter is"):
        mw.open_run(trained.run_dir).export(tmp_path / "out", adapter=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out.failed"}


def test_a_base_that_has_changed_or_gone_is_told_from_the_one(folder, tmp_path):
    glass = write_glass(tmp_path / "glass")
    run = lora_run(tmp_path, "moved", f"hf:{glass}", steps=2)
    mw.train(run)
    path = glass / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for use in (lambda: mw.open_run(run.directory).engine, lambda: mw.train(run)):
        with pytest.raises(UserError, match=r"lora \(fingerprint of the base\) = "):
            use()
    shutil.rmtree(glass)
    with pytest.raises(UserError, match=r"glass': no such folder"):
        mw.open_run(run.directory).engine  # noqa: B018  (it's made when asked for)


@pytest.mark.parametrize("change", [{"alpha": 9.0}, {"rslora": True}, {"targets": ["q_proj"]}])
def test_numbers_and_targets_of_adapters_are_the_runs(trained, folder, change):
    same, other = (
        lora_run(folder, "trained", f"hf:{folder / 'glass'}", lora={**LORA, **more}) for more in ({}, change)
    )
    newest = mw.open_run(trained.run_dir).checkpoint
    check_identity(newest, run_identity(same, same.model.spec), "")
    with pytest.raises(UserError, match=rf"lora\.{next(iter(change))} = "):
        check_identity(newest, run_identity(other, other.model.spec), "")


@pytest.mark.parametrize("change", [{"rank": 8}, {"rank": 0}])
def test_other_adapters_are_another_run(trained, folder, change):
    run = lora_run(folder, "trained", f"hf:{folder / 'glass'}", lora={**LORA, **change})
    with pytest.raises(UserError, match=rf"lora\.{next(iter(change))} = "):
        mw.train(run)


def test_from_a_run_and_no_further(tmp_path):
    """A run can be the base; what has adapters can't, before it is exported."""
    tokenizer = {"kind": "bytes"}
    base = mw.train(still_run(tmp_path, "base", "random", model=TINY, tokenizer=tokenizer)).run_dir
    first = mw.train(lora_run(tmp_path, "first", str(base), tokenizer=tokenizer))
    assert first.evaluation["val_loss"] < 5.6
    assert mw.open_run(first.run_dir).evaluate()["val_loss"] == pytest.approx(first.evaluation["val_loss"], abs=1e-6)
    with pytest.raises(UserError, match=r"belong to the checkpoint of a run.*without --adapter"):
        mw.open_run(first.run_dir).export(tmp_path / "out", adapter=True)
    with pytest.raises(UserError, match=r"adapter: the run has none"):
        mw.open_run(base).export(tmp_path / "out", adapter=True)
    with pytest.raises(UserError, match=r"holds adapters alone.*meshwright export"):
        mw.train(still_run(tmp_path, "second", str(first.run_dir)))
    shutil.rmtree(base / "checkpoints")
    with pytest.raises(UserError, match=r"step_00000002': this checkpoint isn't there any more"):
        mw.open_run(first.run_dir).engine  # noqa: B018  (it's made when asked for)


def test_a_plan_counts_adapters(folder):
    run = lora_run(folder, "planned", f"hf:{folder / 'glass'}")
    full, lora = (mw.plan(one, compiled=False) for one in (still_run(folder, "full", run.model.init), run))
    assert lora.estimate.gradients == 4 * ADAPTERS and full.estimate.gradients == 4 * 852_608
    assert lora.estimate.optimizer == 8 * ADAPTERS + 12  # and three counters
    assert lora.checkpoint_bytes == 12 * ADAPTERS + 12
    assert full.flops_per_token - lora.flops_per_token == 2 * 852_608 - 6 * ADAPTERS
    assert f"{ADAPTERS:,} more, of adapters of rank 4" in str(lora)


def test_a_random_base_is_refused():
    with pytest.raises(UserError, match=r"lora\.rank = 4: .*name a checkpoint as model\.init"):
        mw.make_run({"data": {"train": "x"}, "model": {"preset": "gpt2-tiny"}, "lora": {"rank": 4}})


REFUSED = {
    "w1": (r"'w1': is .*experts.*w1 too", "mixtral-8x7b"),
    "gate": (r"'gate': is .*gate too", "mixtral-8x7b"),
    "lm_head": (r"'lm_head': is lm_head too", "llama-1b"),
    "embed_tokens": (r"'embed_tokens': is model.embed_tokens too", "llama-1b"),
    "norm": (r"'norm': is no linear map of the family llama: self_attn\.q_proj", "llama-1b"),
    "wq": (r"'wq': is no linear map", "llama-1b"),
    "layers.1.q_proj": (r"'layers\.1\.q_proj': is no linear map", "llama-1b"),
    "up_proj": (r"'up_proj': is .*shared_experts.up_proj too", "deepseek-tiny"),
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_can_have_no_adapter_is_refused_by_name(target):
    message, name = REFUSED[target]
    with pytest.raises(UserError, match=r"lora\.targets = " + message):
        adapters_of(preset(name).model_copy(update={"tied_embeddings": False}), [target])


def test_the_target_that_stands_for_all():
    modules = [adapter.module.rpartition("{layer}.")[2] for adapter in adapters_of(preset("mixtral-8x7b"), [ALL])]
    assert modules == [f"self_attn.{part}_proj" for part in "qkvo"]
    assert len(adapters_of(preset("gpt2-tiny"), [ALL])) == 4


# On a mesh.

TINY = {"preset": "llama-tiny", "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48}
MESHES = {
    "cut": {"data": 2, "fsdp": 2, "tensor": 2},
    "circular pipeline": {"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2, "pipeline_rounds": 2},
}


def stepped(folder, mesh):
    """Losses of three steps on one batch, the base's fingerprint, and all parameters as they are merged then."""
    micro = 8 if mesh.get("pipeline") else 0
    train = {"batch_size": 16, "micro_batch_size": micro, "sequence_length": 16}
    more = {"train": train, "tokenizer": {"kind": "bytes"}, "mesh": mesh}
    run = lora_run(folder, "meshed", str(folder / "base"), **more)
    run = run.model_copy(
        update={"model": run.model.model_copy(update={"init": str(folder / "base/checkpoints/step_00000002")})}
    )
    engine = JaxEngine(run, run.model.spec)
    ids_BT = np.random.default_rng(0).integers(0, 257, (16, 17), np.int32)
    batch = Batch(ids_BT[:, :-1], ids_BT[:, 1:], np.ones((16, 16), np.float32))
    losses = [float(engine.train_step(batch)["loss"]) for _ in range(3)]
    host = engine.on_host()
    slices = [(path, index) for path in host.shapes for index in np.ndindex(*host.shapes[path][: path.startswith("b")])]
    return {
        "losses": losses,
        "identity": engine.identity,
        "trained": engine.trained_parameters,
        "sums": [float(np.square(host.read(path, index), dtype=np.float64).sum()) for path, index in slices],
    }


@pytest.fixture(scope="module")
def meshed(tmp_path_factory):
    there = tmp_path_factory.mktemp("meshed")
    mw.train(still_run(there, "base", "random", model=TINY, tokenizer={"kind": "bytes"}))
    os.environ["MESHWRIGHT_TEST_FOLDER"] = str(there)
    try:
        return {"alone": stepped(there, {}), **measured_on_eight_devices(__file__)}
    finally:
        del os.environ["MESHWRIGHT_TEST_FOLDER"]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_adapters(meshed, mesh):
    alone, found = meshed["alone"], meshed[mesh]
    assert alone["losses"][2] < alone["losses"][0] - 1e-3
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-6)
    np.testing.assert_allclose(found["sums"], alone["sums"], rtol=1e-6)
    assert (found["identity"], found["trained"]) == (alone["identity"], alone["trained"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps({name: stepped(Path(os.environ["MESHWRIGHT_TEST_FOLDER"]), MESHES[name]) for name in MESHES}))
