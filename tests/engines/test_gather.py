"""What fsdp sends, and what it doesn't: which changes nothing else."""

import json
import re
import sys
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from virtual import measured_on_eight_devices

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax import sharding
from meshwright.engines.jax.engine import JaxEngine
from meshwright.models import decoder

MODELS = {
    "gpt2": {"preset": "gpt2-tiny", "layers": 2, "width": 64},
    "llama": {"preset": "llama-tiny", "layers": 2},
    "experts": {"preset": "moe-tiny", "layers": 2},
}
SENT = re.compile(r" = \(?(\w+\[[0-9,]*\])\S* .*?(all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")
LAID = re.compile(r"sharding_constraint.*?(?:: |-> )tensor<([0-9x]+)x(f32|bf16)>")


def trained(model: dict, mesh: dict) -> tuple[list[float], list[str]]:
    """Loss and gradient norm of three steps, and the types of what is laid out anew of the shape of a kernel."""
    sizes = {"vocab_size": 300, "context_length": 32}
    train = {"batch_size": 16, "sequence_length": 32, "compute_dtype": "bfloat16"}
    values = {"data": {"train": "none"}, "model": {**model, **sizes}, "mesh": {"data": 1, **mesh}, "train": train}
    run = make_run(values)
    engine, found = JaxEngine(run, run.model.spec), []
    tokens = np.random.default_rng(0).integers(0, 300, (16, 33)).astype(np.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((16, 32), np.float32))
    for _ in range(3):
        values = engine.train_step(batch)
        found += [float(values["loss"]), float(values["grad_norm"])]
    return found, laid_kernels(engine)


def laid_kernels(engine: JaxEngine) -> list[str]:
    """`shape type` of each matrix of a layer that the train step lays out anew."""
    program = engine._program
    step, state = program.train_step, program.state
    with step._mesh.active():
        shapes = (state.shapes, step._mesh.abstract_batch(program.run), step._mesh.to_agree_on(0))
        text = step._jitted.lower(*shapes).as_text()
    blocks = state.shapes.params["blocks"]
    kernels = {leaf.shape[1:] for leaf in _leaves(blocks) if len(leaf.shape) > 2}
    sizes = {"x".join(map(str, shape)) for shape in kernels}
    return sorted({f"{size} {kind}" for size, kind in LAID.findall(text) if size in sizes})


def run_on(mesh: dict, **train: int) -> JaxEngine:
    """An engine of a small Llama that computes in bfloat16."""
    model = {**MODELS["llama"], "vocab_size": 300, "context_length": 32}
    train = {"batch_size": 16, "sequence_length": 32, "compute_dtype": "bfloat16", **train}
    run = make_run({"data": {"train": "none"}, "model": model, "mesh": {"data": 1, **mesh}, "train": train})
    return JaxEngine(run, run.model.spec)


def scores(mesh: dict) -> list[float]:
    """Some scores in float32, as the proof of an export wants them."""
    tokens = np.random.default_rng(0).integers(0, 300, (8, 16)).astype(np.int32)
    return run_on(mesh).logits(tokens)[0, :3].ravel().astype(float).tolist()


def tables_by_micro_batch() -> bool:
    """Whether a pipeline makes a gradient of the table of embeddings of each of its micro-batches."""
    engine = run_on({"pipeline": 2, "data": 4}, micro_batch_size=4)
    step, state = engine._program.train_step, engine._program.state
    with step._mesh.active():
        shapes = (state.shapes, step._mesh.abstract_batch(engine._program.run), step._mesh.to_agree_on(0))
        text = step._jitted.lower(*shapes).as_text()
    rows, width = state.shapes.params["embedding"].shape
    assert f"tensor<{rows}x{width}xf32>" in text
    return f"tensor<4x{rows}x{width}xf32>" in text


def sent(engine: JaxEngine) -> list[list]:
    """What the compiled train step sends, as `[shape, operation]`."""
    return sorted(map(list, set(SENT.findall(engine._program.compile_train_step().as_text()))))


def in_memory() -> dict[str, list[str]]:
    """What is sent to have an array that lies cut along a mesh in the order of its axes, by devices and by XLA."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    laid = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    x = jax.device_put(np.arange(4.0 * 16).reshape(4, 16), laid)

    def by_xla(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout((0, 1)))

    def by_devices(x: jax.Array) -> jax.Array:
        return sharding.in_memory_order({"x": x}, {"x": laid})["x"]

    found = {}
    with jax.set_mesh(mesh):
        for f in by_devices, by_xla:
            call = jax.jit(f, out_shardings=laid).lower(x).compile()
            assert (call(x) == x).all()
            found[f.__name__] = SENT.findall(call.as_text())
    return found


def _leaves(tree: dict) -> list:
    return [leaf for part in tree.values() for leaf in (_leaves(part) if isinstance(part, dict) else [part])]


def measure() -> dict[str, list]:
    """Of each model, as it is and with everything sent in float32."""
    mesh, found = {"fsdp": 4, "data": 2}, {}
    for name, model in MODELS.items():
        found[name] = trained(model, mesh)
        exact = patch.object(sharding, "is_multiplied", lambda *_: False)
        with exact, patch.object(decoder, "is_multiplied", lambda *_: False):
            found[f"{name}, float32"] = trained(model, mesh)
    found["scores"] = [scores({"data": 8}), scores({"fsdp": 4, "data": 2})]
    found["sent"] = sent(run_on({"fsdp": 4, "data": 2}))
    found["in memory"] = in_memory()
    found["tables by micro-batch"] = tables_by_micro_batch()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return measured_on_eight_devices(__file__)


def test_parameters_travel_in_the_type_that_they_are_used_in_and_losses_stay(found):
    for name in MODELS:
        (values, laid), (plain_values, plain_laid) = found[name], found[f"{name}, float32"]
        assert values == plain_values
        new = set(laid) - set(plain_laid)
        assert new and all(entry.endswith("bf16") for entry in new)
    np.testing.assert_allclose(*found["scores"], rtol=1e-5, atol=1e-5)  # of float32, whatever training computes in
    assert not found["tables by micro-batch"]


def test_rows_of_the_table_of_embeddings_are_swapped_and_the_table_stays(found):
    sent = [tuple(entry) for entry in found["sent"]]
    table = "f32[300,128]"
    assert ("f32[128,300]", "all-gather") in sent  # of the head, which is the same array turned round
    assert not [operation for shape, operation in sent if shape == table]
    assert [shape for shape, operation in sent if operation == "all-to-all"]


def test_gradients_are_put_in_order_where_they_lie(found):
    assert found["in memory"]["by_devices"] == []
    assert found["in memory"]["by_xla"]  # which is why devices do it


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
