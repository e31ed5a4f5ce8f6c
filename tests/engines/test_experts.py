"""Experts spread over eight virtual devices, against all of them on one.

The devices must be there before JAX starts, so this file runs itself as a script, once: it measures, and prints what
the tests then look at. Shapes: see `meshwright.models.moe`; M micro-batches, N stages.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from virtual import measured_on_eight_devices, mesh, random

from meshwright.config_train import MESH_AXES
from meshwright.engines.jax.experts import expert_parallel
from meshwright.models.moe import ExpertKernels, top_k, whole_experts

TOKENS = PartitionSpec(("data", "fsdp", "expert"), "context", None)
BATCH, TIME, WIDTH, INNER, EXPERTS, CHOICES = 8, 4, 6, 10, 4, 2
CASES = {
    "nothing to cut": ({"pipeline": 2}, "swiglu", "spread"),
    "data 2": ({"data": 2}, "swiglu", "spread"),
    "tensor 2": ({"tensor": 2}, "gelu", "spread"),
    "expert 4": ({"expert": 4}, "swiglu", "spread"),
    "expert 4, all to the first experts": ({"expert": 4}, "gelu", "lopsided"),
    "data 2, expert 4": ({"data": 2, "expert": 4}, "swiglu", "spread"),
    "fsdp 2, expert 2, tensor 2": ({"fsdp": 2, "expert": 2, "tensor": 2}, "swiglu", "spread"),
    "fsdp 2, expert 2, tensor 2, all to the first": ({"fsdp": 2, "expert": 2, "tensor": 2}, "swiglu", "lopsided"),
    "context 2, expert 2": ({"context": 2, "expert": 2}, "gelu", "spread"),
    "context 2, expert 2, pipeline 2 not mapped": ({"context": 2, "expert": 2, "pipeline": 2}, "swiglu", "spread"),
}


def kernels_of(activation: str, stages: tuple[int, ...] = ()) -> ExpertKernels:
    inward, outward = (*stages, EXPERTS, WIDTH, INNER), (*stages, EXPERTS, INNER, WIDTH)
    gate = random(*inward, seed=1) if activation == "swiglu" else None
    return ExpertKernels(gate, random(*inward, seed=2), random(*outward, seed=3), activation)


def arguments(activation: str, routing: str, batch=BATCH, time=TIME):
    """Input, choices, their weights, kernels, and a gradient of the output."""
    scores = np.random.default_rng(4).random((batch, time, EXPERTS))
    if routing == "lopsided":
        scores[..., :CHOICES] += 1
    gates, chosen = jax.lax.top_k(jnp.asarray(scores, jnp.float32), CHOICES)
    x, dy = (random(batch, time, WIDTH, seed=seed) for seed in (5, 6))
    return x, chosen, gates, kernels_of(activation), dy


def cut(devices, x, chosen, gates, kernels, dy):
    """The arguments of `arguments`, lying on a mesh as they do in training."""

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(devices, PartitionSpec(*spec)))

    gate = None if kernels.gate_EDF is None else put(kernels.gate_EDF, "expert", None, "tensor")
    up, down = put(kernels.up_EDF, "expert", None, "tensor"), put(kernels.down_EFD, "expert", "tensor", None)
    kernels = ExpertKernels(gate, up, down, kernels.activation)
    return *(put(x, *TOKENS) for x in (x, chosen, gates)), kernels, put(dy, *TOKENS)


def forward_and_back(experts):
    @jax.jit
    def run(x, chosen, gates, kernels, dy):
        y, pull = jax.vjp(lambda x, gates, kernels: experts(x, chosen, gates, kernels), x, gates, kernels)
        return y, pull(dy)

    return run


def error(got, want) -> float:
    """Largest difference, relative to the largest number."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.abs(got - want).max() / np.abs(want).max())


def errors(got, want) -> list[float]:
    return [error(*pair) for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]


whole = forward_and_back(whole_experts)


def equality(sizes, activation, routing):
    given = arguments(activation, routing)
    x, chosen, gates, kernels, dy = given
    devices = mesh(sizes)
    with jax.set_mesh(devices):
        placed = cut(devices, *given)
        program = forward_and_back(expert_parallel).lower(*placed).compile()
        got = program(*placed)
    kinds = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    lines = program.as_text().splitlines()
    kernel, gradient = placed[3].up_EDF, got[1][2].up_EDF
    return {
        "errors": errors(got, whole(*given)),
        "experts mixed up": errors(got, whole(x, (chosen + 1) % EXPERTS, gates, kernels, dy)),
        "collectives": {kind: sum(f" {kind}(" in line for line in lines) for kind in kinds},
        "kernel": [kernel.sharding.shard_shape(kernel.shape), gradient.sharding.shard_shape(gradient.shape)],
        "in loops": {
            kind: sum(f" {kind}(" in line and "/while/body/" in line for line in lines) for kind in (*kinds, "dot")
        },
        "dots": sorted({line.split("f32[")[1].split("]")[0] for line in lines if " dot(" in line}),
    }


def rough():
    """Bfloat16 against float32."""
    x, chosen, gates, kernels, dy = given = arguments("swiglu", "spread")
    devices = mesh({"data": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(devices):
        placed = cut(devices, x.astype(jnp.bfloat16), chosen, gates, kernels, dy.astype(jnp.bfloat16))
        got = forward_and_back(expert_parallel)(*placed)
    return {"errors": errors(got, whole(*given)), "types": [str(x.dtype) for x in jax.tree.leaves(got)]}


def uncuttable():
    """Batches that not all axes divide, as in decoding."""
    found = {}
    devices = mesh({"data": 2, "expert": 2, "context": 2})
    for batch, time_ in ((2, 4), (4, 1), (1, 3)):
        given = arguments("swiglu", "spread", batch, time_)
        with jax.set_mesh(devices):
            found[f"{batch} x {time_}"] = errors(forward_and_back(expert_parallel)(*given), whole(*given))
    return found


def layer(experts, weights, x_BTD):
    """A router and its experts, as a residual."""
    router_DE, kernels = weights
    gates, chosen = top_k(jax.nn.softmax(x_BTD @ router_DE), CHOICES)
    return x_BTD + experts(x_BTD, chosen, gates, kernels)


def pipelined(weights, x_MBTD):
    """Each stage on devices of its own, each micro-batch from one to the next; all but the pipeline is automatic."""

    def one_stage(weights, x_MBTD):
        number, last = jax.lax.axis_index("pipeline"), jax.lax.axis_size("pipeline") - 1
        stage = jax.checkpoint(lambda x: layer(expert_parallel, jax.tree.map(lambda w: w[0], weights), x))
        batches = x_MBTD.shape[0]

        def tick(arrived, now):
            batch = jnp.clip(now - number, 0, batches - 1)
            y = stage(jnp.where(number == 0, x_MBTD[batch], arrived))
            return jax.lax.ppermute(y, "pipeline", [(0, 1), (1, 0)]), y

        _, y_M = jax.lax.scan(tick, jnp.zeros_like(x_MBTD[0]), jnp.arange(batches + last))
        return y_M[last:][None]

    stages = PartitionSpec("pipeline")
    y_NMBTD = jax.shard_map(
        one_stage, in_specs=(stages, PartitionSpec()), out_specs=stages, axis_names={"pipeline"}, check_vma=False
    )(weights, x_MBTD)
    return y_NMBTD[-1]


def one_after_another(weights, x_MBTD):
    for stage in range(2):
        mine = jax.tree.map(lambda w, stage=stage: w[stage], weights)
        x_MBTD = jax.vmap(lambda x, mine=mine: layer(plain_experts, mine, x))(x_MBTD)
    return x_MBTD


def plain_experts(x_BTD, chosen_BTJ, gates_BTJ, kernels: ExpertKernels):
    """All tokens through all experts."""
    products = [jnp.einsum("BTD,EDF->BTEF", x_BTD, kernel) for kernel in kernels.inward]
    y_BTED = jnp.einsum("BTEF,EFD->BTED", kernels.activated(*products), kernels.down_EFD)
    return jnp.einsum("BTJD,BTJ->BTD", jnp.take_along_axis(y_BTED, chosen_BTJ[..., None], axis=2), gates_BTJ)


def pipeline():
    weights = random(2, WIDTH, EXPERTS, seed=7), jax.tree.map(lambda w: w / 4, kernels_of("swiglu", (2,)))
    x, dy = (random(3, 4, TIME, WIDTH, seed=seed) for seed in (8, 9))

    def gradients(f):
        return jax.jit(lambda w, x: jax.value_and_grad(lambda w, x: (f(w, x) * dy).sum(), (0, 1))(w, x))

    want = gradients(one_after_another)(weights, x)
    devices = mesh({"pipeline": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(devices):
        program = gradients(pipelined).lower(weights, x).compile()
        got = program(weights, x)
    swapped = gradients(one_after_another)(jax.tree.map(lambda w: w[::-1], weights), x)
    return {
        "errors": errors(got, want),
        "stages swapped": errors(got, swapped),
        "all-to-all": "all-to-all" in program.as_text(),
    }


def measure():
    found = {name: equality(*case) for name, case in CASES.items()}
    return {**found, "rough": rough(), "uncuttable": uncuttable(), "pipeline": pipeline()}


if __name__ == "__main__":
    start = time.monotonic()
    print(json.dumps(measure()))
    print(f"{time.monotonic() - start:.1f} s", file=sys.stderr)
    sys.exit()


@pytest.fixture(scope="module")
def found():
    return measured_on_eight_devices(__file__)


@pytest.mark.parametrize("name", CASES)
def test_equals_all_experts_on_one_device(found, name):
    y, *gradients = found[name]["errors"]
    assert y < 1e-5
    assert max(gradients) < 1e-4
    assert len(gradients) == (5 if CASES[name][1] == "swiglu" else 4)
    assert min(found[name]["experts mixed up"]) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_tokens_travel_and_kernels_stay(found, name):
    sizes = CASES[name][0]
    experts, inner = EXPERTS // sizes.get("expert", 1), INNER // sizes.get("tensor", 1)
    collectives = found[name]["collectives"]
    there_and_back = 5  # tokens, their experts, results; and the gradients of results and of tokens
    assert collectives["all-to-all"] == (there_and_back if "expert" in sizes else 0)
    assert collectives["all-gather"] == 0
    assert found[name]["kernel"] == [[experts, WIDTH, inner]] * 2
    assert found[name]["in loops"].pop("dot") > 0
    assert set(found[name]["in loops"].values()) == {0}
    assert any(dot.endswith(f",{inner}") for dot in found[name]["dots"])
    assert "tensor" not in sizes or not any(dot.endswith(f",{INNER}") for dot in found[name]["dots"])


def test_bfloat16(found):
    assert found["rough"]["types"] == ["bfloat16"] * 2 + ["float32"] * 4
    assert min(found["rough"]["errors"]) > 0
    assert max(found["rough"]["errors"]) < 0.02


def test_batches_that_cannot_be_cut(found):
    for of_batch in found["uncuttable"].values():
        assert max(of_batch) < 1e-4


def test_inside_a_pipeline(found):
    assert max(found["pipeline"]["errors"]) < 1e-4
    assert min(found["pipeline"]["stages swapped"][1:]) > 0.1
    assert found["pipeline"]["all-to-all"]


# What a shard does can be read from a trace, which needs no devices.


def within(**sizes: int):
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(shape, MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))
    )


def test_a_lone_expert_axis_sends_nothing():
    def sent(**sizes):
        with within(**sizes):
            return str(jax.make_jaxpr(expert_parallel)(*arguments("swiglu", "spread")[:4])).count("all_to_all[")

    assert sent(data=2, fsdp=2) == 0
    assert sent(data=2, expert=2) == 3


def test_room_for_the_worst_case():
    """Each of 8 tokens of a device may go to both experts of another, or to the one that it has."""

    def widest(experts):
        with within(expert=experts):
            text = str(jax.make_jaxpr(expert_parallel)(*arguments("swiglu", "spread")[:4]))
        return max(rows for rows in range(1, 200) if f"f32[{rows},{WIDTH}]" in text)

    assert widest(2) == 2 * (BATCH * TIME // 2) * 2
    assert widest(4) == 4 * (BATCH * TIME // 4) * 1
