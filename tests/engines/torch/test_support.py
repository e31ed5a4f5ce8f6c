"""What the PyTorch engine lacks is said before anything is built, with what to do."""

import json
import re

import pytest

pytest.importorskip("transformers")

import meshwright as mw
from meshwright.engines.base import Sampling
from meshwright.engines.torch import mesh as mesh_module
from meshwright.engines.torch.build import skeleton
from meshwright.engines.torch.engine import TorchEngine
from meshwright.engines.torch.mesh import check_mesh, make_torch_mesh, mesh_sizes
from meshwright.engines.torch.optimizer import make_schedule
from meshwright.engines.torch.tensor_plans import plan_of
from meshwright.errors import UserError
from meshwright.launch.group import ALONE

LLAMA = {"preset": "llama-tiny", "vocab_size": 97}


def make_run(**sections):
    values = {"engine": "torch", "data": {"train": "x"}, "model": {**LLAMA, **sections.pop("model", {})}, **sections}
    return mw.make_run(values)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"mesh": {"pipeline": 2}}, "mesh.pipeline = 2: the PyTorch engine has data, fsdp, tensor alone"),
        ({"mesh": {"context": 2}}, "mesh.context = 2"),
        ({"mesh": {"expert": 2}}, "mesh.expert = 2"),
        ({"optimizer": {"kind": "muon"}}, "optimizer.kind = 'muon': the PyTorch engine has adamw and lion"),
        ({"train": {"scan_layers": True}}, "train.scan_layers = true"),
        ({"train": {"float8": True}}, "train.float8 = true: the PyTorch engine multiplies in the compute type alone"),
        (
            {"launch": {"devices_per_worker": 2}},
            "launch.devices_per_worker = 2: a process of the PyTorch",
        ),
        ({"model": {"dropout": 0.1}}, "model.dropout = 0.1: the PyTorch engine has none in models of the family llama"),
        (
            {"model": {"preset": "gpt2-tiny", "dropout": 0.1}, "mesh": {"data": 1, "tensor": 2}},
            "model.dropout = 0.1: the PyTorch engine has none under mesh.tensor",
        ),
        (
            {"train": {"compile_cache": "off"}},
            "train.compile_cache = 'off': the PyTorch engine leaves that to TORCH",
        ),
        (
            {"model": {"preset": "moe-tiny"}, "mesh": {"data": 1, "tensor": 2}},
            "mesh.tensor = 2: .* experts",
        ),
        ({"model": {"preset": "moe-tiny", "capacity_factor": 1.0}}, "model.capacity_factor = 1.0"),
        ({"model": {"preset": "deepseek-tiny"}}, "model.balance_loss = 0.01"),
        ({"model": {"preset": "minigpt-tiny"}}, "model.family = 'minigpt': has no Hugging Face form"),
    ],
)
def test_what_is_not_there_is_named(sections, said):
    run = make_run(**sections)
    with pytest.raises(UserError, match=said) as raised:
        TorchEngine(run, run.model.spec)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("kind", "group"), [("local", ALONE), ("processes", type(ALONE)()), ("ray", ALONE)])
def test_it_is_said_before_anything_is_read_or_started(monkeypatch, kind, group):
    from meshwright import api

    def too_late(*_, **__):
        raise AssertionError("something was read or started")

    for name in ("_train_on_ray", "make_engine"):
        monkeypatch.setattr(api, name, too_late)
    monkeypatch.setattr(api.trainer, "prepare_once", too_late)
    launch = {"kind": kind} if kind == "local" else {"kind": kind, "workers": 2}
    run = make_run(optimizer={"kind": "muon"}, launch=launch)
    with pytest.raises(UserError, match=r"optimizer.kind = 'muon': the PyTorch engine has adamw and lion"):
        mw.train(run, group=group)
    with pytest.raises(UserError, match="metrics: is for the JAX engine"):
        mw.train(make_run(launch=launch), group=group, metrics={"anything": 1})


def no_room(*_, **__):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            "step",
            "train.micro_batch_size = 4: a step of .* 16 tokens finds no room on the card; lower it, set train.rem",
        ),
        (
            "evaluate",
            "train.micro_batch_size = 4: an evaluation of .* 16 tokens finds no room on the card; lower it, or",
        ),
        ("generate", "max_tokens = 9: so many after each of 2 prompts at once finds no room on the card; lower it, or"),
    ],
)
def test_what_finds_no_room_is_told_with_what_to_do(monkeypatch, part, said):
    from meshwright.engines.torch import engine as module

    run = make_run(train={"batch_size": 8, "micro_batch_size": 4, "sequence_length": 16})
    engine = TorchEngine(run, run.model.spec)
    if part == "step":
        monkeypatch.setattr(engine, "_step", no_room)
    else:
        monkeypatch.setattr(module, part, no_room)
    calls = {
        "step": lambda: engine.train_step(None),
        "evaluate": lambda: engine.eval_step(None),
        "generate": lambda: list(engine.generate([[1], [2]], 9, 0, Sampling())),
    }
    with pytest.raises(UserError, match=said):
        calls[part]()


@pytest.mark.parametrize(
    ("part", "lora", "training", "said"),
    [
        ("Placed", {}, True, r"mesh.fsdp = 1: .* finds no room on the card; raise it, or train adapters by \[lora\]"),
        ("start", {}, True, "mesh.fsdp = 1: .* finds no room"),
        ("SeparateOptimizer", {}, True, "mesh.fsdp = 1: .* finds no room"),
        ("Placed", {"rank": 2}, True, "mesh.fsdp = 1: .* finds no room on the card; raise it, or set lora.quantize ="),
        ("Placed", {"rank": 2, "quantize": "nf4"}, True, "model: .* 4 bits finds no room on the card; choose a small"),
        ("Placed", {}, False, "model: .* finds no room on the card; take a larger card, or the CPU by CUDA_VISIBLE"),
    ],
)
def test_a_model_that_finds_no_room_is_told_with_what_to_do(monkeypatch, part, lora, training, said):
    from meshwright.engines.torch import engine as module

    run = make_run()
    run = run.model_copy(update={"lora": run.lora.model_copy(update=lora)})
    monkeypatch.setattr(module, part, no_room)
    with pytest.raises(UserError, match=said):
        TorchEngine(run, run.model.spec, training=training)


def test_parts_from_python_are_for_jax(tmp_path):
    run = make_run()
    for name in ("model", "optimizer", "metrics"):
        with pytest.raises(UserError, match=rf'{name}: is for the JAX engine.*set engine = "jax"'):
            TorchEngine(run, run.model.spec, **{name: {"anything": 1}})


def test_plans_are_made_for_jax():
    with pytest.raises(UserError, match=r'engine = "torch": plans are made for the JAX engine'):
        mw.plan(make_run())


@pytest.mark.parametrize(
    ("sections", "sizes", "said"),
    [
        (
            {"train": {"batch_size": 6}},
            (2, 2, 1),
            "micro_batch_size = 6: must be a multiple of .* = 4",
        ),
        ({"model": {"kv_heads": 1}}, (1, 1, 2), r"mesh.tensor = 2: must divide model.kv_heads = 1 \(it leaves 1\)"),
        ({}, (1, 1, 8), r"mesh.tensor = 8: must divide model.heads = 4 \(it leaves 4\)"),
        ({"train": {"sequence_length": 33}}, (1, 1, 2), "must divide train.sequence_length = 33"),
        ({"model": {"ffn_width": 65}}, (1, 1, 2), "must divide model.ffn_width = 65"),
        (
            {"model": {"kv_heads": 4, "vocab_size": 5}},
            (1, 1, 4),
            "mesh.tensor = 4: each has 2 of the vocabulary of 5, and the last has none; lower it",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_arithmetic(sections, sizes, said):
    run = make_run(**sections)
    with pytest.raises(UserError, match=said):
        check_mesh(run, run.model.spec, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def test_the_last_process_may_have_less_of_the_vocabulary():
    run = make_run(model={"kv_heads": 4, "vocab_size": 7})
    check_mesh(run, run.model.spec, {"data": 1, "fsdp": 1, "tensor": 4})


@pytest.fixture
def unreadable(tmp_path):
    """A checkpoint whose weights are broken."""
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    return f"hf:{tmp_path}"


def engine_of(init: str, **sections) -> TorchEngine:
    train = {"batch_size": 8, "sequence_length": 16}
    run = mw.make_run({"engine": "torch", "data": {"train": "x"}, "model": {"init": init}, "train": train, **sections})
    return TorchEngine(run, run.model.spec)


@pytest.mark.parametrize(
    ("processes", "sizes", "said"),
    [
        (1, {"data": 3}, "mesh: data 3 = 3 devices, but there are 1 processes"),
        (3, {"data": 3}, "train.micro_batch_size = 8: must be a multiple of"),
        (8, {"data": 1, "tensor": 8}, "mesh.tensor = 8: must divide model.heads = 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_a_weight_is_read(unreadable, monkeypatch, processes, sizes, said):
    with pytest.raises(UserError, match=r"model\.safetensors"):
        engine_of(unreadable, mesh={"data": 1})
    monkeypatch.setattr(mesh_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(mesh_module.dist, "get_world_size", lambda: processes)
    with pytest.raises(UserError, match=said):
        engine_of(unreadable, mesh=sizes)


def test_adapters_are_not_cut(unreadable):
    with pytest.raises(UserError, match=r"model\.safetensors"):
        engine_of(unreadable, lora={"rank": 2}, mesh={"data": 1, "tensor": 1})
    with pytest.raises(UserError, match=r"mesh.tensor = 2: the PyTorch engine doesn't cut adapters; change it, or set"):
        engine_of(unreadable, lora={"rank": 2}, mesh={"data": 1, "tensor": 2})


def test_a_plan_with_a_cut_that_the_engine_lacks_is_refused():
    assert len(plan_of(skeleton(make_run().model.spec))) == 7 * make_run().model.spec.layers
    run = make_run(model={"preset": "olmo2-tiny"})
    said = r'mesh.tensor: \S*q_proj of olmo2 would be cut "colwise_\w+", which the PyTorch engine doesn\'t do; set it'
    with pytest.raises(UserError, match=said):
        plan_of(skeleton(run.model.spec))


def test_sizes_make_up_the_processes():
    assert mesh_sizes(make_run(mesh={"fsdp": 2}), 8) == {"data": 4, "fsdp": 2, "tensor": 1}
    with pytest.raises(UserError, match=r"data 3 = 3 devices, but there are 4 processes"):
        mesh_sizes(make_run(mesh={"data": 3}), 4)
    with pytest.raises(UserError, match=r"mesh.data = -1: what is left of 4 processes after tensor 3 = 3 isn't whole"):
        mesh_sizes(make_run(mesh={"tensor": 3}), 4)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({}, 2),
        ({"mesh": {"data": 2, "fsdp": 2}}, 8),
        ({"mesh": {"data": 2, "tensor": 2}}, 4),
        ({"launch": {"kind": "processes", "workers": 4}, "mesh": {"tensor": 2}}, 4),
        ({"launch": {"kind": "processes", "workers": 4}, "mesh": {"data": 1, "fsdp": 2, "tensor": -1}}, 4),
        ({"mesh": {"data": 3}}, 2),  # it doesn't divide
    ],
)
def test_one_process_takes_no_more_rows_at_once_than_each_of_several_did(sections, parts):
    run = make_run(train={"batch_size": 16, "micro_batch_size": 8}, **sections)
    mesh = make_torch_mesh(run, run.model.spec, training=False)
    assert (mesh.accumulate, mesh.rows(16).tolist()) == (parts, [*range(16)])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_those_of_the_jax_engine(kind, warmup):
    from meshwright.engines.jax.optimizer import make_schedule as theirs

    schedule = {"kind": kind, "warmup_steps": warmup, "final_share": 0.0, "decay_steps": 9 if kind == "wsd" else 0}
    run = make_run(schedule=schedule, train={"steps": 40})
    ours, jax = make_schedule(run), theirs(run, run.optimizer.learning_rate)
    for count in range(45):
        assert ours(count) == pytest.approx(float(jax(count)), rel=1e-5, abs=1e-9)


def test_torch_without_transformers_is_asked_for(monkeypatch):
    import sys

    from meshwright import engines
    from meshwright.api import make_engine

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(engines, "torch", engines.torch)  # imported anew below, and put back after
    for name in [name for name in sys.modules if name.startswith("meshwright.engines.torch")]:
        monkeypatch.delitem(sys.modules, name)
    run = make_run()
    with pytest.raises(UserError, match=re.escape("pip install 'meshwright[torch]'")):
        make_engine(run, run.model.spec, model=None)
