"""Windows, bounds of scores and norms of queries and keys on meshes, against one device.

This file runs itself as a script on eight virtual devices, once: it measures, and prints what the tests then look at.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_values
from virtual import measured_on_eight_devices, mesh, random

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.loss import Head, cross_entropy_sum
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.ring import ring_attention, zigzag_order
from meshwright.engines.jax.step import make_loss
from meshwright.models.attention import attend, causal_mask
from meshwright.models.decoder import Decoder
from meshwright.models.gradients import Scoring

ROWS, TIME = 4, 32
SMALL = {"layers": 4, "width": 32, "heads": 4, "head_width": 8, "ffn_width": 48, "vocab_size": 61}
GEMMA2 = {"attention_softcap": 0.5, "final_softcap": 1.0, "window": 5, "kv_heads": 2, "embedding_scale": 5.0}
GEMMA3 = {
    "window": 7,
    "global_every": 3,
    "rope_theta": 500.0,
    "local_rope_theta": 50.0,
    "kv_heads": 1,
    "qk_norm": "all",
}
CASES = {
    "gemma2, pipeline 2, two rounds, context 2": (
        "gemma2-tiny",
        GEMMA2,
        {"pipeline": 2, "pipeline_rounds": 2, "context": 2, "data": 2},
        True,
    ),
    "gemma3, context 2, fsdp 2": ("gemma3-tiny", GEMMA3, {"context": 2, "fsdp": 2, "tensor": 2}, False),
}
RINGS = {
    "window within a chunk": (3, None),
    "window beyond a shard": (20, None),
    "window, bound and scale": (11, Scoring(0.9, 0.7)),
}


def batch(vocab: int) -> Batch:
    draw = np.random.default_rng(0).integers
    inputs, targets = draw(0, vocab, (2, ROWS, TIME), dtype=np.int32)
    return Batch(inputs, targets, draw(0, 2, (ROWS, TIME)).astype(np.float32))


def loss_on_one_device(spec, batch: Batch):
    """The loss as a function of the parameters."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))))

    def loss(params):
        model = nnx.merge(graph, params)
        x_ND = model.hidden(batch.inputs_BT)[0].reshape(-1, spec.width)
        targets_N, weights_N = batch.targets_BT.reshape(-1), batch.weights_BT.reshape(-1)
        more = {"chunk": 32, "vocab": spec.vocab_size, "softcap": spec.final_softcap}
        return cross_entropy_sum(x_ND, Head(*model.head_weights()), targets_N, weights_N, **more)

    return loss


def difference(got, want) -> float:
    """Largest of any parameter, relative to its largest number."""

    def one(a, b) -> float:
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3))

    return max(one(*pair) for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def on_a_mesh(preset: str, changes: dict, sizes: dict, scan_layers: bool) -> dict[str, float]:
    model = {"preset": preset, **SMALL, **changes}
    train = {"compute_dtype": "float32", "sequence_length": TIME, "batch_size": ROWS, "scan_layers": scan_layers}
    train |= {"micro_batch_size": 2}
    run = make_run(run_values("x", model=model, mesh={"data": 1, **sizes}, train=train))
    spec = run.model.spec
    program = Program(run, spec, model=Decoder)
    loss_sum = make_loss(program.state.graph, run, spec, program.mesh, jnp.float32)
    count = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: x + jax.device_put(0.1 * count.standard_normal(x.shape).astype(np.float32), x.sharding),
        program.make_state().params,
    )
    examples = program.mesh.place(batch(spec.vocab_size))

    def loss(params, examples):
        if sizes.get("pipeline", 1) > 1:
            return loss_sum(params, examples).total
        parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], examples) for i in range(program.mesh.accumulate)]
        return sum(loss_sum(params, part).total for part in parts)

    got, gradients = program.compiled(jax.value_and_grad(loss))(params, examples)

    def whole(tree):
        plain = jax.tree.map(np.asarray, program.state.in_order(tree))
        return {**plain, "embedding": plain["embedding"][: spec.vocab_size]} | (
            {"head": {"kernel": plain["head"]["kernel"][:, : spec.vocab_size]}} if "head" in plain else {}
        )

    alone = loss_on_one_device(spec, batch(spec.vocab_size))
    want, expected = jax.jit(jax.value_and_grad(alone))(whole(params))
    plain = spec.model_copy(
        update={"window": 0, "global_every": 0, "local_rope_theta": 0.0, "attention_softcap": 0.0, "rope_theta": 9.0}
    )
    without = jax.jit(loss_on_one_device(plain, batch(spec.vocab_size)))(whole(params))
    return {
        "loss": abs(float(got) / float(want) - 1),
        "gradients": difference(whole(gradients), expected),
        "without": abs(float(without) / float(want) - 1),
    }


def ring(window: int | None, scoring: Scoring | None) -> dict[str, float]:
    q, k, v, dy = (random(2, TIME, heads, 8, seed=i) for i, heads in enumerate((4, 2, 2, 4)))
    size = None if window is None else jnp.int32(window)
    order = zigzag_order(TIME, 4)
    back = np.argsort(order)

    @jax.jit
    def plain(q, k, v, dy):
        mask = causal_mask(jnp.arange(TIME), None, size)
        y, pull = jax.vjp(lambda *x: attend(*x, mask, scoring=scoring), q, k, v)
        return y, *pull(dy)

    want = plain(q, k, v, dy)
    with jax.set_mesh(mesh({"context": 4, "tensor": 2})):

        @jax.jit
        def run(q, k, v, dy, size):
            y, pull = jax.vjp(lambda *x: ring_attention(*x, None, size, scoring), q, k, v)
            return y, *pull(dy)

        got = [np.asarray(x)[:, back] for x in run(*(np.asarray(x)[:, order] for x in (q, k, v, dy)), size)]
    unlike = attend(q, k, v, causal_mask(jnp.arange(TIME)))
    return {"equal": difference(got, want), "unlike": difference([unlike], want[:1])}


@pytest.fixture(scope="module")
def measured():
    return measured_on_eight_devices(__file__)


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_sees_what_one_device_does(measured, name):
    found = measured["cases"][name]
    assert found["loss"] < 1e-5, found
    assert found["gradients"] < 2e-4, found
    assert found["without"] > 1e-4, found


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_has_windows_and_bounds(measured, name):
    assert measured["rings"][name]["equal"] < 1e-5
    assert measured["rings"][name]["unlike"] > 1e-2


if __name__ == "__main__":
    cases = {name: on_a_mesh(*case) for name, case in CASES.items()}
    json.dump({"cases": cases, "rings": {name: ring(*case) for name, case in RINGS.items()}}, sys.stdout)
