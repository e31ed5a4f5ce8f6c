"""First layers without experts: a stack of their own, counted, cut over a mesh, and refused with a pipeline."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_values
from virtual import measured_on_eight_devices

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.flops import multiplied_parameters
from meshwright.engines.jax.estimate import estimate, flops_per_token
from meshwright.engines.jax.memory_check import compiled_bytes
from meshwright.engines.jax.mesh import check_mesh, mesh_sizes
from meshwright.engines.jax.optimizer import make_optimizer
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.step import TrainState
from meshwright.errors import UserError
from meshwright.models.decoder import Decoder, active_parameter_count, parameter_count

VOCAB, TIME, BATCH = 61, 32, 8
MODEL = {
    "preset": "deepseek-tiny",
    "vocab_size": VOCAB,
    "layers": 3,
    "dense_layers": 1,
    "dense_ffn_width": 80,
    "width": 32,
    "heads": 4,
    "kv_heads": 4,
    "head_width": 8,
    "rotary_width": 4,
    "kv_latent": 16,
    "query_latent": 24,
    "ffn_width": 16,
    "experts": 8,
    "router_groups": 4,
    "router_groups_used": 2,
    "router_group_score": "top2",
    "router_scale": 1.5,
}
MESH = {"fsdp": 2, "expert": 2, "tensor": 2}


def make(model: dict | None = None, **sections):
    values = run_values("x", model={**MODEL, **(model or {})}, **sections)
    values["model"].pop("context_length", None)
    values["train"] |= {"batch_size": BATCH, "scan_layers": True, **sections.get("train", {})}
    return make_run(values)


def batch(seed: int = 0, rows: int = BATCH) -> Batch:
    inputs, targets = np.random.default_rng(seed).integers(0, VOCAB, (2, rows, TIME), dtype=np.int32)
    return Batch(inputs, targets, np.ones((rows, TIME), np.float32))


def start(program: Program) -> TrainState:
    """The initial state, with a bias that matters."""
    params = program.make_state().params
    bias = 0.2 * np.random.default_rng(7).standard_normal(params["blocks"]["mlp"]["router_bias"].shape)
    old = params["blocks"]["mlp"]["router_bias"]
    params["blocks"]["mlp"]["router_bias"] = jax.device_put(jnp.asarray(bias, jnp.float32), old.sharding)
    with program.mesh.active():
        optimizer = jax.jit(make_optimizer(program.run).init)(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer)


def trained(mesh: dict[str, int]) -> tuple[list[list[float]], dict]:
    """Loss and norm of the gradient of each step, and the parameters after the last."""
    run = make(mesh=mesh)
    program = Program(run, run.model.spec, model=Decoder)
    state, values = start(program), []
    for seed in range(3):
        state, told = program.train_step(state, program.mesh.place(batch(seed)))
        values.append([float(told["loss"]), float(told["grad_norm"])])
    return values, state.params


def measure() -> dict:
    values, params = trained(MESH)
    shard = params["dense_blocks"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape
    return {"values": values, "shard": shard, "bias": np.asarray(params["blocks"]["mlp"]["router_bias"]).tolist()}


def test_a_mesh_trains_as_one_device_does():
    found, (values, params) = measured_on_eight_devices(__file__), trained({"data": 1})
    np.testing.assert_allclose(found["values"], values, rtol=1e-4)
    np.testing.assert_array_equal(np.float32(found["bias"]), params["blocks"]["mlp"]["router_bias"])
    assert found["shard"] == [1, 32 // 2, 80 // 2]


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon", "schedule_free"])
def test_no_optimizer_changes_the_bias(kind):
    sizes = {"vocab_size": VOCAB, "layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8, "ffn_width": 8}
    values = run_values("x", model={"preset": "moe-tiny", **sizes, "router_bias": True}, schedule={"kind": "constant"})
    run = make_run(values | {"optimizer": {"kind": kind, "weight_decay": 0.5, "learning_rate": 3e-3}})
    program = Program(run, run.model.spec, model=Decoder)
    state = start(program)
    before = jax.tree.map(np.asarray, state.params)
    for seed in range(2):
        state, _ = program.train_step(state, program.mesh.place(batch(seed, rows=4)))
    evaluated = program.average(state.optimizer, state.params)
    for params in (state.params, evaluated):
        for (path, new), old in zip(
            jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(before), strict=True
        ):
            same = np.array_equal(new, old)
            assert same == (getattr(path[-1], "key", "") == "router_bias"), jax.tree_util.keystr(path)


def test_counts_by_hand():
    spec = make().model.spec
    norms = 2 * 32 + 16 + 24
    attention = 32 * (24 + 16 + 4) + 24 * 4 * (8 + 4) + 16 * 4 * 16 + 4 * 8 * 32
    dense, expert = 3 * 32 * 80, 3 * 32 * 16
    sparse = 8 * expert + expert + (32 + 1) * 8
    whole = 2 * VOCAB * 32 + 32 + 3 * (norms + attention) + dense + 2 * sparse
    assert parameter_count(spec) == whole
    assert active_parameter_count(spec) == whole - 2 * (8 - 2) * expert
    assert multiplied_parameters(spec, active_parameter_count(spec)) == active_parameter_count(spec) - VOCAB * 32
    square = flops_per_token(spec, TIME) - flops_per_token(spec, 0)
    assert square == 6 * 3 * 4 * ((8 + 4) + 8) * TIME  # all layers have attention


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_estimate_is_near_what_xla_counts(remat):
    run = make({"layers": 5, "dense_layers": 3, "dense_ffn_width": 320}, train={"remat": remat})
    program = Program(run, run.model.spec, model=Decoder)
    by_analysis = estimate(run, program.spec, program.mesh, program.state, program.dtype)
    assert by_analysis.parameters == 4 * parameter_count(program.spec)
    assert 1 / 1.25 < compiled_bytes(program.compile_train_step()) / by_analysis.total < 1.25


def test_scanned_layers_equal_unrolled_ones():
    spec = make().model.spec
    ids = jnp.asarray(batch().inputs_BT)

    @nnx.jit(static_argnames=("scan", "remat"))
    def hidden(model, scan, remat):
        return model.hidden(ids, scan_layers=scan, remat=remat)

    model = Decoder(spec, rngs=nnx.Rngs(0))
    want, routing_L = hidden(model, scan=False, remat="none")
    got, scanned_L = hidden(model, scan=True, remat="full")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert routing_L.load_E.shape == scanned_L.load_E.shape == (2, 8)  # of layers with experts alone


def test_a_pipeline_is_refused():
    run = make(mesh={"pipeline": 2}, model={"layers": 6})
    with pytest.raises(UserError) as error:
        check_mesh(run, run.model.spec, mesh_sizes(run, 2))
    assert str(error.value) == (
        "mesh.pipeline = 2: each stage needs the same layers, but the first 1 of 6 have one feed-forward part and the "
        "other 5 have experts; set mesh.pipeline = 1 and use expert, fsdp or tensor in its place, or "
        "model.dense_layers = 0"
    )
    run = make(mesh={"pipeline": 2}, model={"layers": 6, "dense_layers": 0})
    check_mesh(run, run.model.spec, mesh_sizes(run, 2))


def test_the_dense_width_must_divide():
    run = make(mesh={"tensor": 4}, model={"dense_ffn_width": 82})
    with pytest.raises(UserError, match=r"mesh\.tensor = 4: must divide model\.dense_ffn_width = 82"):
        check_mesh(run, run.model.spec, mesh_sizes(run, 4))


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
