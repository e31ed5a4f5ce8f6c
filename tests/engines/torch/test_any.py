"""Models of `transformers` that are of none of Meshwright's families: trained as a plain loop trains them, and kept."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import torch
import torch_jobs
from families import theirs
from helpers import kill, meshwright, run_values, start_meshwright, wait_for, write_corpus, write_run
from torch_jobs import LAYOUTS, STEPS, VOCAB, Layout, batch, make_engine, make_run, result, train
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.data.examples import Batch
from meshwright.engines.base import Sampling
from meshwright.engines.torch.optimizer import make_schedule
from meshwright.errors import UserError

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
_SHORT = {"n_embd": 32, "n_layer": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
CODEGEN = {**_SHORT, "n_head": 8, "n_ctx": 64, "rotary_dim": 4}
MODELS = {
    "codegen": ("codegen", CODEGEN),
    "gpt_neox": ("gpt_neox", _SIZES),  # its head is called otherwise in checkpoints
    "phi": ("phi", _SIZES),  # its head has a bias
    "opt": ("opt", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),  # layers further inside; tied
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),  # takes no positions
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),  # has no attention
    "cohere": ("cohere", {**_SIZES, "num_key_value_heads": 2}),  # multiplies its scores
    "olmoe": ("olmoe", {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2}),  # has experts one by one in checkpoints
}
SHORT = {"sequence_length": 16}
CASES = [f"{name}/{layout}" for name in ("codegen", "gpt_neox", "cohere") for layout in ("fsdp 2", "tensor 2")]
CASES += ["codegen/ddp 2", "opt/fsdp 2, accumulation 2", "olmoe/fsdp 2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("any")
    for name, (kind, keys) in MODELS.items():
        theirs(kind, **keys).save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def meshes(folder):
    torch_jobs.start(folder, 2, CASES)
    return folder


def plain_losses(folder, run) -> list[float]:
    """What a loop of `transformers` and PyTorch alone gives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    rate, groups = make_schedule(run), {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim >= 2].append(parameter)
    decays = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(decays, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(STEPS):
        inputs, targets, weights = (torch.from_numpy(part) for part in batch(step)[:3])
        scores = model(inputs.long(), use_cache=False).logits
        each = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.long().flatten(), reduction="none")
        loss = (each * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_a_plain_loop_does_and_writes(folder, name):
    run = make_run(folder / name, Layout({}))
    assert run.model.family == "transformers" and run.model.layers == 2
    engine, found = train(run)
    np.testing.assert_allclose(found["loss"], plain_losses(folder / name, run), rtol=1e-5)
    assert abs(found["loss"][-1] - found["loss"][0]) > 1e-4 * found["loss"][0]
    together = list(engine.generate([[1, 2, 3], [4]], 5, VOCAB, Sampling(temperature=0)))
    for number, prompt in enumerate(([1, 2, 3], [4])):
        text = list(prompt)
        for step in range(5):  # without a cache or padding
            scores_V = engine.logits(np.array([text]))[0, -1]
            assert scores_V[together[step][number]] > scores_V.max() - 1e-4
            text.append(together[step][number])


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(meshes, case):
    name, layout = case.split("/")
    one, many = train(make_run(meshes / name, Layout({})))[1], result(meshes, case)
    assert len(many["rows"]) < len(one["rows"]) or "tensor" in case
    for key in ("loss", "norm", "eval"):
        np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    compared = 0
    for key, value in one.items():
        if key.startswith("initial/"):
            np.testing.assert_array_equal(many[key], value)
        elif key.startswith("gradient/") and not key.endswith(("k_proj.bias", "query_key_value.bias")):
            assert np.linalg.norm(value - many[key]) < 1e-4 * np.linalg.norm(value), key
            compared += 1
    assert compared > STEPS * 15
    read, _, parameters = many["read"]
    if name == "codegen" and LAYOUTS[layout].mesh.get("data", 1) == 1:
        assert read < 0.6 * parameters  # just its share of the checkpoint


def test_every_mesh_writes_the_same_text(meshes):
    texts = {layout: result(meshes, f"codegen/{layout}")["text"].tolist() for layout in ("fsdp 2", "tensor 2", "ddp 2")}
    engine = train(make_run(meshes / "codegen", Layout({})))[0]
    assert list(engine.generate([[1, 2, 3], [4]], 6, VOCAB, Sampling(seed=1))) == texts["fsdp 2"]
    assert texts["fsdp 2"] == texts["tensor 2"] == texts["ddp 2"]


def packed(one: Batch) -> Batch:
    """Each row as two documents of half its length."""
    half = one.inputs_BT.shape[1] // 2
    place_T = np.arange(2 * half, dtype=np.int32)
    segments, positions = 1 + (place_T >= half).astype(np.int32), place_T % half
    shape = one.inputs_BT.shape
    return one._replace(segments_BT=np.broadcast_to(segments, shape), positions_BT=np.broadcast_to(positions, shape))


@pytest.mark.parametrize("name", ["codegen", "gpt_neox", "phi"])
def test_documents_of_a_row_are_kept_apart(folder, name):
    engine = make_engine(make_run(folder / name, Layout({}), data={"packing": "packed"}))
    one = batch(0)
    halves = Batch(*(np.concatenate(np.split(part, 2, axis=1)) for part in one[:3]))
    apart, cut, whole = (float(engine.eval_step(rows)[0]) for rows in (packed(one), halves, one))
    assert apart == pytest.approx(cut, rel=1e-5)
    assert abs(apart - whole) > 2e-4 * whole


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_documents_that_it_would_mix_are_refused(folder, name):
    with pytest.raises(
        UserError, match=rf"model_type '{name}' don't keep the documents of a row apart; set data.docum"
    ):
        make_engine(make_run(folder / name, Layout({}), data={"packing": "packed"}))
    make_engine(make_run(folder / name, Layout({}), data={"packing": "packed", "document_mask": False}))


def test_what_sees_later_tokens_is_refused(tmp_path):
    theirs("bert", **_SIZES).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model_type = 'bert': its scores of a token depend on tokens that come later"):
        make_engine(make_run(tmp_path, Layout({})))


# Whole runs


def values(folder, init: dict, **sections) -> dict:
    made = run_values(write_corpus(folder / "texts"), engine="torch", **sections)
    return {**made, "model": init}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that started from a checkpoint, which is gone since; it was killed and gone on with."""
    folder = tmp_path_factory.mktemp("trained")
    model = theirs("codegen", **CODEGEN)
    model.resize_token_embeddings(257)
    model.save_pretrained(folder / "base")
    train_keys = {"steps": 24, "eval_every": 12, "batch_size": 8}
    for name in ("whole", "broken"):
        (folder / name).mkdir()
        run = values(folder / name, {"init": f"hf:{folder / 'base'}"}, name="tiny", train=train_keys)
        write_run(folder / name / "run.toml", run | {"checkpoint": {"every": 4, "keep": 9}})
    done = meshwright("train", "run.toml", cwd=folder / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    process = start_meshwright("train", "run.toml", cwd=folder / "broken")
    saved = folder / "broken/runs/tiny/checkpoints/step_00000004/manifest.json"
    try:
        wait_for(saved.exists, process)
    finally:
        kill(process)
    shutil.rmtree(folder / "base")
    again = meshwright("train", "runs/tiny/run.toml", cwd=folder / "broken")  # the resolved one
    assert again.returncode == 0, again.stdout + again.stderr
    return folder


@pytest.mark.slow
def test_killed_it_goes_on_bit_for_bit_without_the_checkpoint(trained):
    one, other = (mw.open_run(trained / name / "runs/tiny").metrics() for name in ("whole", "broken"))
    assert other["loss"].tolist() == one["loss"].tolist()
    assert len(one["loss"]) == 24 and one["loss"][-1] < one["loss"][0] - 0.1


def test_the_commands_need_the_run_directory_alone(trained, tmp_path):
    run = tmp_path / "moved"
    shutil.copytree(trained / "whole/runs/tiny", run)
    opened = mw.open_run(run)
    assert len(opened.generate("the quick ", max_tokens=5)[0]) > 0
    done = opened.export(tmp_path / "out")
    assert any("transformers" in line and "largest difference" in line for line in done.proof)
    config = json.loads((done.path / "config.json").read_text())
    assert (config["model_type"], config["rotary_dim"], config["dtype"]) == ("codegen", 4, "float32")
    assert "codegen: 2 layers of width 32" in (done.path / "README.md").read_text()
    tokens = np.random.default_rng(0).integers(0, 257, (2, 14))
    model = AutoModelForCausalLM.from_pretrained(done.path, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(opened.engine.logits(tokens), scores, atol=1e-5)
    shown = meshwright("eval", "runs/tiny", cwd=trained / "whole")
    assert f"{opened.evaluations()['val_loss'][-1]:.4f}" in shown.stdout, shown.stderr


@pytest.mark.parametrize(("kind", "name"), [("gpt_neox", "embed_out.weight"), ("olmoe", "experts.3.up_proj.weight")])
def test_an_export_has_the_names_that_checkpoints_have(folder, tmp_path, monkeypatch, kind, name):
    from safetensors import safe_open

    monkeypatch.chdir(tmp_path)
    keys = {**MODELS[kind][1], "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **keys}))
    run = mw.make_run(values(tmp_path, {"config": f"hf:{tmp_path}"}, train={"steps": 2}))
    done = mw.open_run(mw.train(run).run_dir).export(tmp_path / "out", dtype="bfloat16")
    names = []
    for path in (done.path, folder / kind):
        with safe_open(path / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1] and any(one.endswith(name) for one in names[0])


@pytest.mark.parametrize("kind", ["codegen", "gpt_neox", "gpt2"])
def test_a_config_alone_starts_as_transformers_would(tmp_path, kind):
    keys = MODELS[kind][1] if kind in MODELS else {**_SHORT, "n_head": 4}
    wanted = theirs(kind, **keys).config
    model = AutoModelForCausalLM.from_config(wanted)
    wanted.save_pretrained(tmp_path)
    run = make_run("", Layout({}), model={"config": f"hf:{tmp_path}", "init": "random", "family": "transformers"})
    assert run.model.vocab_size == VOCAB
    assert mw.make_run(run.model_dump(exclude_none=True)) == run  # resolved, it needs no folder
    found, other = (make_engine(one).on_host() for one in (run, run.model_copy(update={"seed": 1})))
    for name, rule in {rule.name((1,) * rule.stacked): rule for rule in make_engine(run)._placed.names.rules}.items():
        mine = found.read(rule.ours, (1,) * rule.stacked)
        start = model.get_parameter(name).detach().numpy()
        assert mine.std() == pytest.approx(start.std(), rel=0.15), name
        assert mine.mean() == pytest.approx(start.mean(), abs=0.12 / np.sqrt(mine.size)), name
        assert (mine.std() == 0) == np.array_equal(mine, other.read(rule.ours, (1,) * rule.stacked)), name


def test_a_config_alone_of_a_family_of_ours_serves_both_engines(tmp_path):
    theirs("gpt2", **_SHORT, n_head=4).config.save_pretrained(tmp_path)
    section = {"config": f"hf:{tmp_path}", "layers": 3, "width": 64}
    for engine in ("jax", "torch"):
        model = mw.make_run({"engine": engine, "data": {"train": "x"}, "model": section, "train": SHORT}).model
        assert (model.family, model.layers, model.width, model.head_width, model.config) == ("gpt2", 3, 64, 16, "")


def test_a_vocabulary_and_dropout_can_be_others(folder):
    config = f"hf:{folder / 'codegen'}"
    run = make_run("", Layout({}), model={"config": config, "init": "random", "vocab_size": 120, "dropout": 0.5})
    engine = make_engine(run)
    assert engine._placed.names.theirs["lm_head.weight"] == (120, 32)
    rates = {module.p for module in engine._placed.module.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.5}
    again, plain = make_engine(run), float(engine.eval_step(batch(0))[0]) / batch(0).weights_BT.sum()
    first = float(engine.train_step(batch(0))["loss"])
    assert float(again.train_step(batch(0))["loss"]) == first != pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(("kind", "pad"), [("olmo", 1), ("phi3", 32_000), ("opt", 1), ("modernbert-decoder", 50_283)])
def test_no_token_is_padding_in_a_model_with_another_vocabulary(tmp_path, kind, pad):
    """PyTorch keeps the embedding of padding at zero, and refuses one that isn't in the table."""
    from transformers import AutoConfig

    from meshwright.hub import any_model

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    model = {"config": f"hf:{tmp_path}", "family": "transformers", "vocab_size": 60_000}
    made = mw.make_run({"engine": "torch", "data": {"train": "x"}, "model": model, "train": {"sequence_length": 16}})
    text = any_model.config_of(made.model.spec).get_text_config(decoder=True)
    assert AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True).pad_token_id == pad
    assert text.pad_token_id == (pad if kind == "modernbert-decoder" else None)  # which must have one


# Adapters


def lora_run(folder, base, **sections):
    more = {"lora": {"rank": 4, "alpha": 8.0}, "schedule": {"kind": "constant"}, **sections}
    made = values(folder, {"init": f"hf:{base}"}, **more)
    made["checkpoint"] = {"every": 2, "keep": 9}
    return mw.make_run(made)


def test_adapters_are_trained_gone_on_with_and_exported(folder, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model = theirs("codegen", **CODEGEN)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "base")
    more = {"train": {"steps": 4, "eval_every": 4, "log_every": 1}}
    run = lora_run(tmp_path, tmp_path / "base", **more, name="whole")
    mw.train(run)
    short = run.model_copy(update={"name": "two", "train": run.train.model_copy(update={"steps": 2})})
    mw.train(short)
    opened = mw.open_run(mw.train(short.model_copy(update={"train": run.train})).run_dir)
    assert opened.metrics()["loss"].tolist() == mw.open_run(run.directory).metrics()["loss"].tolist()
    assert opened.engine.trained_parameters == 2 * 4 * ((32 + 96) + (32 + 32) + 2 * (32 + 128))
    alone = opened.export(tmp_path / "adapters", adapter=True)
    assert any("and peft" in line for line in alone.proof)
    targets = json.loads((alone.path / "adapter_config.json").read_text())["target_modules"]
    assert set(targets) == {"qkv_proj", "out_proj", "fc_in", "fc_out"}
    assert any("and transformers" in line for line in opened.export(tmp_path / "merged").proof)


def test_a_target_that_is_not_there_is_named(folder, tmp_path):
    run = lora_run(tmp_path, folder / "codegen")
    wrong = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": ["q_proj"]})})
    with pytest.raises(UserError, match=r"lora.targets = 'q_proj': .*attn\.out_proj, attn\.qkv_proj, mlp\.fc_in"):
        make_engine(wrong)


# Refusals


def test_jax_refuses_it_by_name(folder):
    section = {"init": f"hf:{folder / 'codegen'}"}
    with pytest.raises(UserError, match=r'engine = "jax": has no model of model_type \'codegen\'.*engine = "torch"'):
        mw.make_run({"data": {"train": "x"}, "model": section, "train": SHORT})


def test_without_transformers_it_is_asked_for(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"model_type = 'codegen': .* needs transformers, which isn't installed"):
        make_run(folder / "codegen", Layout({}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "made_up", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "'made_up': .* is never run"),
        ({"model_type": "vit"}, "'vit': this version of transformers has no causal language model of that name"),
        ({"model_type": "codegen", "quantization_config": {}}, "quantization_config = {}: quantized"),
    ],
)
def test_what_transformers_has_not_is_refused(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        make_run(tmp_path, Layout({}))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"layers": 3}, "model.layers = 3: the checkpoint .* has 2"),
        ({"context_length": 32}, "model.context_length = 32: the checkpoint"),
        ({"config": "hf:x"}, "model.config: comes with the checkpoint"),
        ({"config": "x", "init": "random"}, "model.config = 'x': must be hf:"),
        ({"family": "transformers", "vocab_size": 99}, "model.vocab_size = 99: the checkpoint .* has 97"),
        ({"config": "hf:x", "init": "random", "preset": "gpt2"}, "model.config: both it and preset"),
        ({"config": "hf:/not/there", "init": "random"}, "model.config = 'hf:/not/there': no such folder"),
        ({"init": "random", "preset": "gpt2", "family": "transformers"}, 'model.family = "transformers" needs config'),
    ],
)
def test_what_does_not_fit_its_config_is_refused(folder, section, said):
    with pytest.raises(UserError, match=said):
        make_run(folder / "codegen", Layout({}), model=section)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("bloom", 2, "mesh.tensor: there is no plan by which bloom is cut; .* raise mesh.fsdp"),
        ("codegen", 8, "mesh.tensor = 8: must divide the 4 groups of heads"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(folder, name, tensor, said):
    from meshwright.engines.torch.build import skeleton
    from meshwright.engines.torch.tensor_plans import cut_attention, plan_of

    model = skeleton(make_run(folder / name, Layout({})).model.spec)
    with pytest.raises(UserError, match=said):
        for module, style in plan_of(model).items():
            if style == "colwise":
                cut_attention(model, module, tensor)


def test_a_checkpoint_may_have_what_is_passed_over_but_must_have_all(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder / "codegen", tmp_path / "other")
    tensors, path = load_file(folder / "codegen/model.safetensors"), tmp_path / "other/model.safetensors"
    more = {"transformer.h.0.attn.causal_mask": np.ones((2, 2), np.float32)}  # of older versions
    save_file(tensors | more, path)
    make_engine(make_run(tmp_path / "other", Layout({})))
    save_file(tensors | {"transformer.h.0.attn.gate": more["transformer.h.0.attn.causal_mask"]}, path)
    with pytest.raises(UserError, match=r"holds transformer\.h\.0\.attn\.gate, which the family transf"):
        make_engine(make_run(tmp_path / "other", Layout({})))
    tensors.pop("transformer.h.1.ln_1.bias")
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"lacks transformer\.h\.1\.ln_1\.bias; give a whole checkpoint"):
        make_engine(make_run(tmp_path / "other", Layout({})))


def test_a_checkpoint_of_the_model_without_its_head_will_do_where_it_is_tied(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "opt")
    model.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "opt/config.json").read_text())
    one, other = (train(make_run(place, Layout({})))[1]["loss"] for place in (folder / "opt", tmp_path))
    assert one.tolist() == other.tolist()
