"""Maps in 4 bits: what is refused, what they compute, and that all else of a LoRA run is as it is beside whole ones.

The runs are on the CPU, which no run file may ask for: `check_device` is taken out for them.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from families import theirs
from helpers import run_values, write_corpus
from torch import nn
from transformers.pytorch_utils import Conv1D

import meshwright as mw
from meshwright.data.examples import Batch
from meshwright.engines.torch import nf4, plan
from meshwright.engines.torch.build import FusedMaps
from meshwright.engines.torch.engine import TorchEngine
from meshwright.engines.torch.fingerprint import base_fingerprint
from meshwright.errors import UserError
from meshwright.hub.adapter import Base
from meshwright.hub.export import write_model

ROTARY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
SHORT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "llama": ("llama", ROTARY),
    "qwen2": ("qwen2", {**ROTARY, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", SHORT),
    "codegen": ("codegen", {**SHORT, "n_ctx": 64, "rotary_dim": 4}),
}
LORA = {"rank": 4, "alpha": 8.0}
NF4 = {**LORA, "quantize": "nf4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qlora")
    write_corpus(folder / "texts")
    for name, (kind, keys) in MODELS.items():
        model = theirs(kind, **keys)
        model.resize_token_embeddings(257)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(plan, "check_device", lambda device: None)


def run_of(folder, name, init, lora=NF4, **sections):
    values = run_values(folder / "texts", lora=lora, schedule={"kind": "constant"}, **sections)
    values |= {"engine": "torch", "name": name, "run_dir": str(folder / name), "model": {"init": str(init)}}
    values["train"] |= {"steps": 4, "batch_size": 2, "eval_every": 2, **sections.get("train", {})}
    values["checkpoint"] = {"every": 2, "keep": 9}
    return mw.make_run(values)


def losses_of(engine, steps=5):
    random, found = np.random.default_rng(0), []
    for _ in range(steps):
        tokens = random.integers(0, 257, (2, 65)).astype(np.int32)
        batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((2, 64), np.float32))
        step = engine.train_step(batch)
        found.append([float(step["loss"]), float(step["grad_norm"])])
    return np.array(found)


def test_what_it_needs_is_said_when_the_run_file_is_read(folder):
    run = run_of(folder, "read", f"hf:{folder / 'llama'}", LORA).model_dump(exclude_none=True)
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": .*; set lora.rank, or leave it out'):
        mw.make_run({**run, "lora": {"quantize": "nf4"}})
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": engine = "jax" has .*; set engine = "torch"'):
        mw.make_run({**run, "lora": NF4, "engine": "jax"})
    assert mw.make_run({**run, "lora": NF4}).lora.quantize == "nf4"


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_meshes_that_share_maps_out_are_refused(folder, axis):
    run = run_of(folder, "mesh", f"hf:{folder / 'llama'}", mesh={"data": 1, axis: 2})
    with pytest.raises(UserError, match=rf"mesh.{axis} = 2: .*set it to 1, and mesh.data to the number of devices"):
        TorchEngine(run, run.model.spec)


def test_experts_are_refused(folder, tmp_path):
    theirs("mixtral", **ROTARY, num_local_experts=4).save_pretrained(tmp_path / "mixtral")
    run = run_of(folder, "experts", f"hf:{tmp_path / 'mixtral'}")
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": experts'):
        TorchEngine(run, run.model.spec)


def test_a_cpu_and_a_missing_library_are_refused(folder, monkeypatch):
    run = run_of(folder, "cpu", f"hf:{folder / 'llama'}")
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": QLoRA runs on CUDA only'):
        TorchEngine(run, run.model.spec)
    monkeypatch.setattr(nf4, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs bitsandbytes.*pip install 'meshwright\[qlora\]'"):
        nf4.check_device(torch.device("cuda"))


@pytest.mark.parametrize("shape", [(128, 192), (96, 341), (33, 7)])
def test_numbers_are_near_what_they_stand_for(shape):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    packed = nf4.pack(matrix)
    back = nf4.unpack(packed, *shape, torch.float32)
    blocks = nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()[: matrix.numel()].view(shape)
    # The widest gap between two of the sixteen levels is 0.304 of the largest, and that is 8 bits itself.
    assert ((back - matrix).abs() <= (0.152 + 0.05) * largest).all()
    assert 0.05 < float((back - matrix).square().mean().sqrt()) < 0.11  # of numbers whose deviation is 1
    assert torch.equal(nf4.unpack(packed, *shape, torch.bfloat16), back.bfloat16())
    if matrix.numel() > 10_000:
        assert sum(part.nbytes for part in packed) / matrix.numel() == pytest.approx(0.5 + 1 / 64, abs=1e-3)


def whole_map(kind):
    torch.manual_seed(1)
    conv = Conv1D(96, 64)
    conv.bias.data.normal_()
    made = {"linear": nn.Linear(64, 96), "bare": nn.Linear(64, 96, bias=False), "conv": conv}
    return {**made, "fused": FusedMaps(conv, 3)}[kind]


@pytest.mark.parametrize("kind", ["linear", "bare", "conv", "fused"])
def test_a_map_is_the_product_with_its_dequantised_matrix(kind):
    pytest.importorskip("bitsandbytes")
    whole = whole_map(kind).requires_grad_(False)
    ours = nf4.Nf4Map(whole)
    before, given = whole(torch.ones(1, 64)), whole.weight.clone()
    ours.put(given, "map")
    whole.weight.copy_(ours.value())
    assert not torch.allclose(whole(torch.ones(1, 64)), before, atol=1e-3)
    x, dy = torch.randn(2, 5, 64, requires_grad=True), torch.randn(2, 5, 96)
    y, meant = ours(x), whole(x)
    torch.testing.assert_close(y, meant, rtol=1e-5, atol=1e-5)
    (dx,), (meant_dx,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(meant, x, dy)
    torch.testing.assert_close(dx, meant_dx, rtol=1e-5, atol=1e-5)
    ours.put(given.flatten(1), "map")  # as a checkpoint has it
    assert torch.equal(ours.value(), whole.weight) and torch.equal(ours(x), y)


def test_the_operations_are_known_to_what_compiles():
    pytest.importorskip("bitsandbytes")
    ours = nf4.Nf4Map(nn.Linear(64, 96))
    ours.put(torch.randn(96, 64), "map")
    parts, x = [getattr(ours, name) for name in nf4.Packed._fields], torch.randn(2, 5, 64)
    torch.library.opcheck(nf4.product, (x.requires_grad_(), *parts, ours.bias.detach(), 96))
    torch.library.opcheck(nf4.gradient, (torch.randn(2, 5, 96), *parts, 64))
    y = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y, ours(x))
    (dx,), (meant,) = (torch.autograd.grad(out.sum(), x) for out in (y, ours(x)))
    assert torch.equal(dx, meant) and dx.any()


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_lora_does_from_the_dequantised_checkpoint(folder, on_cpu, tmp_path, name):
    run = run_of(folder, "steps", f"hf:{folder / name}")
    engine = TorchEngine(run, run.model.spec)
    write_model(
        tmp_path, run.model.spec, Base(engine.adapters_on_host()), dtype="float32", shard_bytes=10**9, tokens={}
    )
    layers = {
        f"{map_}.weight" for map_, module in engine._placed.module.model.named_modules() if hasattr(module, "lora_a")
    }
    assert layers == engine._placed.quantized.keys() and len(layers) >= 2 * 4
    theirs_of = {key: value.detach() for key, value in engine._placed.tensors.items()}
    assert not layers & theirs_of.keys()
    ours = losses_of(engine)
    results = {}
    for kind, init in (("dequantised", tmp_path), ("whole", folder / name)):
        lora = run_of(folder, "steps", f"hf:{init}", LORA)
        other = TorchEngine(lora, lora.model.spec)
        results[kind] = losses_of(other)
        assert other.parameters == engine.parameters and other.trained_parameters == engine.trained_parameters
    np.testing.assert_allclose(ours, results["dequantised"], rtol=1e-5)
    assert np.abs(ours - results["whole"]).max() > 1e-4 and ours[-1, 0] != ours[0, 0]


@pytest.mark.parametrize("remat", ["none", "full", "products"])
def test_no_matrix_is_kept_from_the_forward_to_the_backward_pass(folder, on_cpu, monkeypatch, remat):
    run = run_of(folder, "kept", f"hf:{folder / 'llama'}", train={"remat": remat})
    engine, seen, made = TorchEngine(run, run.model.spec), [], []
    unpack = nf4.unpack
    monkeypatch.setattr(nf4, "unpack", lambda *what: made.append(1) or unpack(*what))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append((x.dtype, tuple(x.shape))) or x, lambda x: x):
        losses = losses_of(engine, 2)
    maps = {engine._placed.names.theirs[name] for name in engine._placed.quantized}
    assert seen and not [1 for dtype, shape in seen if dtype.is_floating_point and {shape, shape[::-1]} & maps]
    # Once forward and once back, but for what nothing trained comes before; forward again where products aren't kept.
    assert len(made) == 2 * (14 * {"none": 2, "full": 3, "products": 2}[remat] - 3)
    plain = run_of(folder, "kept", f"hf:{folder / 'llama'}")
    np.testing.assert_allclose(losses, losses_of(TorchEngine(plain, plain.model.spec), 2), rtol=1e-6)


def test_a_run_goes_on_from_the_same_base_and_not_from_a_whole_one(folder, on_cpu):
    init = f"hf:{folder / 'qwen2'}"
    unbroken = mw.train(run_of(folder, "unbroken", init))
    mw.train(run_of(folder, "in-two", init, train={"steps": 2}))
    again = mw.open_run(mw.train(run_of(folder, "in-two", init)).run_dir)
    assert again.metrics()["loss"].tolist() == mw.open_run(unbroken.run_dir).metrics()["loss"].tolist()
    key = "lora (fingerprint of the base)"
    whole = run_of(folder, "in-two", init, LORA, train={"steps": 6})
    with pytest.raises(UserError, match=r"lora.quantize = 'none'; the checkpoint was made with 'nf4'"):
        mw.train(whole)
    assert again.checkpoint.manifest["identity"][key] == base_fingerprint(again.engine._placed)
    assert base_fingerprint(TorchEngine(whole, whole.model.spec)._placed) != base_fingerprint(again.engine._placed)
    assert again.evaluate()["val_loss"] == pytest.approx(unbroken.evaluation["val_loss"], rel=1e-5)
    assert len(list(again.generate(["Once"], max_tokens=3))) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "codegen"])
def test_an_export_is_the_dequantised_base_with_the_adapters_added(folder, on_cpu, tmp_path, name):
    pytest.importorskip("peft")
    opened = mw.open_run(mw.train(run_of(folder, f"exported-{name}", f"hf:{folder / name}")).run_dir)
    engine = opened.engine
    done = opened.export(tmp_path / "whole")
    assert any("and transformers" in line for line in done.proof)
    from safetensors.numpy import load_file

    written, placed = load_file(tmp_path / "whole" / "model.safetensors"), engine._placed
    for weight, module in placed.quantized.items():
        base = module.value().numpy().reshape(placed.names.theirs[weight])
        map_ = placed.module.model.get_submodule(weight.removesuffix(".weight"))
        added = 2.0 * (map_.lora_b @ map_.lora_a).detach().numpy()
        added = added.T if module._is_turned else added
        found = next(written[key] for key in (weight, weight.partition(".")[2]) if key in written)
        np.testing.assert_allclose(found, base + added, rtol=1e-5, atol=1e-6)
        assert np.abs(added).max() > 1e-4
    alone = opened.export(tmp_path / "adapters", adapter=True)
    assert any("and peft" in line for line in alone.proof)
    assert "their base was in 4 bits (NF4)" in (tmp_path / "adapters" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "whole"]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_it_starts_from_a_run_as_from_its_export(folder, on_cpu, tmp_path, name):
    trained = mw.train(run_of(folder, f"trained-{name}", f"hf:{folder / name}", {"rank": 0}, train={"steps": 2}))
    mw.open_run(trained.run_dir).export(tmp_path / "export")
    found = []
    for number, init in enumerate((trained.run_dir, f"hf:{tmp_path / 'export'}")):
        done = mw.train(run_of(folder, f"from-{name}-{number}", init, train={"steps": 2}))
        found.append(mw.open_run(done.run_dir))
    key = "lora (fingerprint of the base)"
    first, second = (opened.checkpoint.manifest["identity"][key] for opened in found)
    assert first == second
    assert found[0].metrics()["loss"].tolist() == found[1].metrics()["loss"].tolist()


def test_a_lora_run_from_before_there_were_4_bits_goes_on(folder):
    init = f"hf:{folder / 'llama'}"
    done = mw.train(run_of(folder, "before", init, LORA, train={"steps": 2}))
    path = done.run_dir / "checkpoints" / "step_00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["identity"].pop("lora.quantize") == "none"
    path.write_text(json.dumps(manifest))
    assert len(mw.open_run(mw.train(run_of(folder, "before", init, LORA)).run_dir).metrics()["loss"]) == 4


_WORKER = """
import json, sys
import torch.distributed as dist
import meshwright.engines.torch.plan as plan
plan.check_device = lambda device: None
rank, place, run_file, tests = int(sys.argv[1]), *sys.argv[2:5]
sys.path[:0] = [tests, tests + "/engines/torch"]
import numpy as np
import meshwright as mw
from meshwright.data.examples import Batch
from meshwright.engines.torch.engine import TorchEngine
dist.init_process_group("gloo", init_method="file://" + place, rank=rank, world_size=2)
run = mw.make_run(json.loads(open(run_file).read()))
engine, random, found = TorchEngine(run, run.model.spec), np.random.default_rng(0), []
for _ in range(5):
    tokens = random.integers(0, 257, (2, 65)).astype(np.int32)[engine.rows]
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((len(tokens), 64), np.float32))
    step = engine.train_step(batch)
    found.append([float(step["loss"]), float(step["grad_norm"])])
print(json.dumps([found, engine.identity["lora (fingerprint of the base)"], len(engine.rows)]))
dist.destroy_process_group()
"""


def test_two_processes_with_a_copy_each_train_the_same(folder, on_cpu, tmp_path):
    run = run_of(folder, "two", f"hf:{folder / 'llama'}", mesh={"data": 2})
    (tmp_path / "run.json").write_text(json.dumps(run.model_dump(exclude_none=True)))
    command = [sys.executable, "-c", _WORKER]
    rest = [str(tmp_path / "store"), str(tmp_path / "run.json"), str(Path(__file__).parents[2])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(rank), *rest], **pipes) for rank in range(2)]
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    alone = run_of(folder, "two", f"hf:{folder / 'llama'}")
    one = TorchEngine(alone, alone.model.spec)
    meant = losses_of(one)
    for out, _ in said:
        losses, fingerprint, rows = json.loads(out.splitlines()[-1])
        np.testing.assert_allclose(losses, meant, rtol=1e-5)
        assert rows == 1 and fingerprint == one.identity["lora (fingerprint of the base)"]


def test_models_that_use_a_map_in_another_way_are_refused(folder, on_cpu, tmp_path):
    falcon = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
    theirs("falcon", **falcon).save_pretrained(tmp_path / "falcon")
    run = run_of(folder, "falcon", f"hf:{tmp_path / 'falcon'}")
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": .* is a FalconLinear, .*set it to "none"'):
        TorchEngine(run, run.model.spec)
    theirs("mamba", hidden_size=64, num_hidden_layers=2, state_size=4).save_pretrained(tmp_path / "mamba")
    run = run_of(folder, "mamba", f"hf:{tmp_path / 'mamba'}", data={"packing": "padded"})
    with pytest.raises(UserError, match=r'lora.quantize = "nf4": .* uses the numbers of a linear map by itself'):
        TorchEngine(run, run.model.spec)


def test_a_base_with_numbers_that_are_not_finite_is_refused(folder, on_cpu, tmp_path):
    model = theirs("llama", **ROTARY)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    run = run_of(folder, "broken", f"hf:{tmp_path / 'broken'}")
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight holds numbers that aren't finite"):
        TorchEngine(run, run.model.spec)
