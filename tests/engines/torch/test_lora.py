"""LoRA runs of the PyTorch engine: what is trained, kept, gone on from and exported; and that JAX does the same."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parents[2] / "hub"))
sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

from families import theirs
from glass import write_glass
from helpers import meshwright, write_run
from processes import run_processes
from runs import still_run
from torch_jobs import Layout, make_engine, make_run

import meshwright as mw
from meshwright.data.examples import Batch
from meshwright.engines.torch.engine import TorchEngine
from meshwright.engines.torch.plan import own
from meshwright.errors import UserError

LORA = {"rank": 4, "alpha": 8.0}
ADAPTERS = 4 * 4 * (2 * 128 + 2 * (128 + 64) + 2 * 128 + 3 * (128 + 341))  # layers, rank; q, k and v, o, the MLP


def lora_run(folder, name, init, **sections):
    more = {"lora": LORA, "optimizer": {"learning_rate": 3e-3}, "schedule": {"kind": "constant"}}
    more |= {"checkpoint": {"every": 2, "keep": 9}, "train": {"steps": 4, "log_every": 1, **sections.pop("train", {})}}
    run = still_run(folder, name, init, **more, **sections)
    return run.model_copy(update={"engine": "torch"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    write_glass(folder / "glass")
    theirs("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64).save_pretrained(folder / "gpt2")
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return mw.train(lora_run(folder, "trained", f"hf:{folder / 'glass'}"))


def test_adapters_alone_are_trained_and_kept(folder, trained):
    from torch.distributed.checkpoint import FileSystemReader

    opened = mw.open_run(trained.run_dir)
    engine = opened.engine
    assert (engine.trained_parameters, engine.parameters) == (ADAPTERS, 852_608)
    stored = FileSystemReader(trained.run_dir / "checkpoints/step_00000004/state").read_metadata().state_dict_metadata
    assert sum("lora_" in name for name in stored) == len(stored) - 1 == 3 * 2 * 4 * 7
    losses = opened.metrics()["loss"]
    assert losses[-1] < losses[0]
    assert opened.evaluate()["val_loss"] == pytest.approx(trained.evaluation["val_loss"], rel=1e-5)
    changed = [name for name, p in engine._placed.parameters.items() if name.endswith("lora_b") and own(p).any()]
    assert len(changed) == 4 * 7


def test_it_goes_on_where_it_stopped(folder, trained):
    run = lora_run(folder, "in-two", f"hf:{folder / 'glass'}", train={"steps": 2})
    mw.train(run)
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 4})})
    again = mw.open_run(mw.train(longer).run_dir).metrics()
    assert again["loss"].tolist() == mw.open_run(trained.run_dir).metrics()["loss"].tolist()


@pytest.mark.parametrize("family", ["glass", "gpt2"])
def test_both_forms_of_an_export_are_proven(folder, trained, tmp_path, family):
    run_dir = trained.run_dir
    if family == "gpt2":
        tokenizer = {"kind": "bytes"}
        with pytest.raises(UserError, match=r"has a vocabulary of 97, and the text holds the tokenizer's id 256"):
            mw.train(lora_run(folder, "gpt2-run", f"hf:{folder / 'gpt2'}", tokenizer=tokenizer))
        model = theirs("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64)
        model.resize_token_embeddings(257)
        model.save_pretrained(folder / "gpt2-257")
        run_dir = mw.train(lora_run(folder, "gpt2-run", f"hf:{folder / 'gpt2-257'}", tokenizer=tokenizer)).run_dir
    opened = mw.open_run(run_dir)
    whole = opened.export(tmp_path / "whole")
    assert any("and transformers" in line for line in whole.proof)
    alone = opened.export(tmp_path / "adapters", adapter=True)
    assert any("and peft" in line for line in alone.proof)


def test_jax_trains_the_same_from_the_same_numbers(folder):
    from meshwright.engines.jax.engine import JaxEngine

    run = lora_run(folder, "parity", f"hf:{folder / 'glass'}")
    ours, jax = TorchEngine(run, run.model.spec), JaxEngine(run.model_copy(update={"engine": "jax"}), run.model.spec)
    host, mine = jax.adapters_on_host(), ours.adapters_on_host()
    assert {path for path in mine.shapes if ".lora." in path} == {path for path in host.shapes if ".lora." in path}
    import torch

    for path, shape in mine.shapes.items():
        assert host.shapes[path] == shape
        if path.endswith(".lora.a"):
            for layer in range(shape[0]):
                found = [name for name in ours._placed.parameters if name.endswith("lora_a") and f".{layer}." in name]
                name = next(n for n in found if np.array_equal(mine._tensor(n).T, mine.read(path, (layer,))))
                own(ours._placed.parameters[name]).copy_(torch.from_numpy(host.read(path, (layer,)).T.copy()))
    random = np.random.default_rng(0)
    losses = []
    for _ in range(5):
        tokens = random.integers(0, 1024, (2, 65)).astype(np.int32)
        batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((2, 64), np.float32))
        losses.append([float(engine.train_step(batch)[key]) for engine in (ours, jax) for key in ("loss", "grad_norm")])
    table = np.array(losses)
    np.testing.assert_allclose(table[:, :2], table[:, 2:], rtol=1e-4)
    assert abs(table[-1, 0] - table[0, 0]) > 1e-3


def test_two_processes_train_the_same_adapters_of_the_same_base(folder, trained):
    sections = {"launch": {"kind": "processes", "workers": 2}, "mesh": {"data": 1, "fsdp": 2}}
    run = lora_run(folder, "two", f"hf:{folder / 'glass'}", **sections)
    write_run(folder / "two.toml", run.model_dump(exclude_none=True))
    done = meshwright("train", "two.toml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    two, one = mw.open_run(run.directory), mw.open_run(trained.run_dir)
    np.testing.assert_allclose(two.metrics()["loss"], one.metrics()["loss"], rtol=1e-5)
    key = "lora (fingerprint of the base)"
    fingerprints = [opened.checkpoint.manifest["identity"][key] for opened in (one, two)]
    assert fingerprints[0] == fingerprints[1]
    engine = one.engine
    with np.errstate(all="ignore"):
        own(engine._placed.tensors["model.norm.weight"])[0] += 1e-3
    from meshwright.engines.torch.fingerprint import base_fingerprint

    assert base_fingerprint(engine._placed) != fingerprints[0]


DEEPSEEK = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
DEEPSEEK |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16}
DEEPSEEK |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "max_position_embeddings": 64}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_group": 1, "topk_group": 1}


def fingerprint(_group, checkpoint: str, mesh: dict[str, int]) -> str:
    untrained = {"balance_loss": 0.0, "router_z_loss": 0.0}
    run = make_run(checkpoint, Layout(mesh), model=untrained, lora=LORA)
    return make_engine(run).identity["lora (fingerprint of the base)"]


def test_what_is_in_each_process_whole_is_one_part_of_the_base(tmp_path):
    import torch

    model = theirs("deepseek_v3", **DEEPSEEK)
    found = []
    for bias in (0.1, 0.2):  # a buffer, which FSDP2 doesn't share out
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias * torch.arange(8))
        model.save_pretrained(tmp_path)
        found.append(fingerprint(None, str(tmp_path), {}))
    assert found[0] != found[1]
    assert run_processes(fingerprint, arguments=(str(tmp_path), {"fsdp": 2}), engine="torch") == [found[1]] * 2
