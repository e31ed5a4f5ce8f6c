"""Attention in a ring, on eight virtual devices, against `attend` with a mask on one.

The devices must be there before JAX starts, so this file runs itself as a script, once: it measures, and prints what
the tests then look at. Shapes: see `meshwright.engines.jax.ring`; D width, M micro-batches, N stages, J joined heads.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from virtual import measured_on_eight_devices, mesh, random

from meshwright.config_train import MESH_AXES
from meshwright.engines.jax.ring import ring_attention, zigzag_order
from meshwright.models.attention import attend, causal_mask

CUT = PartitionSpec(("data", "fsdp", "expert"), "context", "tensor")
BATCH, TIME, HEADS, KV_HEADS, WIDTH, VALUES = 2, 32, 4, 2, 8, 6
DOCUMENTS = ([1, 13, 1, 9, 8], [20, 1, 1, 10])  # chunks of 2 to 16: documents within one, and over some
CASES = {
    "context 1, documents": ({"context": 1}, KV_HEADS, True),
    "context 2": ({"context": 2}, KV_HEADS, False),
    "context 2, documents": ({"context": 2}, KV_HEADS, True),
    "context 4": ({"context": 4}, KV_HEADS, False),
    "context 4, documents": ({"context": 4}, KV_HEADS, True),
    "context 8": ({"context": 8}, KV_HEADS, False),
    "context 8, documents": ({"context": 8}, KV_HEADS, True),
    "context 2, tensor 2, data 2": ({"context": 2, "tensor": 2, "data": 2}, KV_HEADS, False),
    "context 2, tensor 2, data 2, documents": ({"context": 2, "tensor": 2, "data": 2}, KV_HEADS, True),
    "context 2, expert 2, pipeline 2 not mapped, ungrouped": ({"context": 2, "expert": 2, "pipeline": 2}, HEADS, False),
}


def arguments(kv_heads=KV_HEADS):
    """Queries, keys, values and a gradient of the output, by place."""
    shapes = (HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUES), (HEADS, VALUES)
    return [random(BATCH, TIME, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def documents():
    return jnp.asarray([np.repeat(np.arange(len(lengths)), lengths) for lengths in DOCUMENTS], jnp.int32)


@jax.jit
def ring(q, k, v, segments, dy):
    """Output and gradients, all by column."""
    y, pull = jax.vjp(ring_attention, q, k, v, segments)
    return y, *pull(dy)[:3]


@jax.jit
def plain(q, k, v, segments, dy):
    """The same by place, on one device."""
    y, pull = jax.vjp(lambda *x: attend(*x, causal_mask(jnp.arange(q.shape[1]), segments)), q, k, v)
    return y, *pull(dy)


def by_place(f, order, q, k, v, segments, dy):
    """Give a function of columns its arguments by place, and what it returns by place."""
    columns = [None if x is None else np.asarray(x)[:, order] for x in (q, k, v, segments, dy)]
    return [np.asarray(x).astype(np.float32)[:, np.argsort(order)] for x in f(*columns)]


def error(got, want) -> float:
    """Largest difference, relative to the largest number."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.abs(got - want).max() / np.abs(want).max())


def errors(got, want) -> dict[str, float]:
    return {name: error(*pair) for name, *pair in zip("yqkv", got, want, strict=True)}


def equality(sizes, kv_heads, packed):
    q, k, v, dy = arguments(kv_heads)
    segments = documents() if packed else None
    order, natural = zigzag_order(TIME, sizes["context"]), np.arange(TIME)
    with jax.set_mesh(mesh(sizes)):
        found = {
            "zig-zag": by_place(ring, order, q, k, v, segments, dy),
            "natural": by_place(ring, natural, q, k, v, segments, dy),
        }
    found["one text"] = plain(q, k, v, None, dy)
    want = plain(q, k, v, segments, dy)
    return {name: errors(got, want) for name, got in found.items()}


def causality():
    """`[t, t']`: whether the output at place t' of keys or values has a gradient from the output at place t."""
    q, k, v, dy = arguments()
    order = zigzag_order(TIME, 4)
    keys, values = [], []
    with jax.set_mesh(mesh({"context": 4})):
        for place in range(TIME):
            _, _, dk, dv = by_place(ring, order, q, k, v, None, dy * (jnp.arange(TIME) == place)[:, None, None])
            keys.append([bool(x) for x in np.abs(dk).max(axis=(0, 2, 3)) > 0])
            values.append([bool(x) for x in np.abs(dv).max(axis=(0, 2, 3)) > 0])
    return {"keys": keys, "values": values, "order": order.tolist()}


def rough(scale=1.0, segments=None):
    """Bfloat16 against float32, from the same numbers."""
    q, k, v, dy = (x.astype(jnp.bfloat16) for x in arguments())
    q, order = q * scale, zigzag_order(TIME, 4)
    exact = [
        np.asarray(x) for x in plain(*(x.astype(jnp.float32) for x in (q, k, v)), segments, dy.astype(jnp.float32))
    ]
    with jax.set_mesh(mesh({"context": 4})):
        got = by_place(ring, order, q, k, v, segments, dy)
        types = jax.eval_shape(ring, q, k, v, segments, dy)
    return {
        "types": [str(x.dtype) for x in types],
        "errors": [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, exact, strict=True)],
        "finite": all(np.isfinite(x).all() for x in got),
    }


def attention_stage(attention, weights, x_BTD, segments):
    """One layer of attention."""
    batch, time, _ = x_BTD.shape
    q, k, v = (
        (x_BTD @ w_DJ).reshape(batch, time, heads, -1)
        for w_DJ, heads in zip(weights[:3], (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    return x_BTD + attention(q, k, v, segments).reshape(batch, time, -1) @ weights[3]


def pipelined(weights, x_MBTD, segments_MBT):
    """Each stage on devices of its own, each micro-batch from one to the next; all but the pipeline is automatic."""

    def one_stage(weights, x_MBTD, segments_MBT):
        number, last = jax.lax.axis_index("pipeline"), jax.lax.axis_size("pipeline") - 1
        stage = jax.checkpoint(lambda *given: attention_stage(ring_attention, [w[0] for w in weights], *given))
        batches = x_MBTD.shape[0]

        def tick(arrived, time):
            batch = jnp.clip(time - number, 0, batches - 1)
            y = stage(jnp.where(number == 0, x_MBTD[batch], arrived), segments_MBT[batch])
            return jax.lax.ppermute(y, "pipeline", [(0, 1), (1, 0)]), y

        _, y_M = jax.lax.scan(tick, jnp.zeros_like(x_MBTD[0]), jnp.arange(batches + last))
        return y_M[last:][None]

    stages, everywhere = PartitionSpec("pipeline"), PartitionSpec()
    y_NMBTD = jax.shard_map(
        one_stage,
        in_specs=(stages, everywhere, everywhere),
        out_specs=stages,
        axis_names={"pipeline"},
        check_vma=False,
    )(weights, x_MBTD, segments_MBT)
    return y_NMBTD[-1]


def one_after_another(weights, x_MBTD, segments_MBT):
    """The same on one device, by place."""

    def attention(q, k, v, segments):
        return attend(q, k, v, causal_mask(jnp.arange(q.shape[1]), segments))

    ys = []
    for x, segments in zip(x_MBTD, segments_MBT, strict=True):
        for stage in range(2):
            x = attention_stage(attention, [w[stage] for w in weights], x, segments)
        ys.append(x)
    return jnp.stack(ys)


def pipeline():
    width, sizes = 8, {"pipeline": 2, "context": 2, "tensor": 2}
    joined = HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * VALUES
    weights = [random(2, width, j, seed=9 + i) / 2 for i, j in enumerate(joined)]
    weights.append(random(2, HEADS * VALUES, width, seed=13) / 2)
    x, dy = (random(3, BATCH, TIME, width, seed=seed) for seed in (14, 15))
    segments = jnp.stack([documents(), documents()[::-1], jnp.zeros_like(documents())])

    def gradients(f):
        return jax.jit(lambda w, x, s, dy: jax.value_and_grad(lambda w, x: (f(w, x, s) * dy).sum(), (0, 1))(w, x))

    _, want = gradients(one_after_another)(weights, x, segments, dy)
    found = {}
    with jax.set_mesh(mesh(sizes)):
        program = gradients(pipelined)
        for name, order in {"zig-zag": zigzag_order(TIME, 2), "natural": np.arange(TIME)}.items():
            _, (dw, dx) = program(weights, x[:, :, order], segments[:, :, order], dy[:, :, order])
            got = jax.tree.leaves((dw, dx[:, :, np.argsort(order)]))
            found[name] = [error(a, b) for a, b in zip(got, jax.tree.leaves(want), strict=True)]
    return found


def program():
    """What XLA makes of a pass forward and back, all arrays lying cut; and of the plain form, for comparison."""
    devices, counted = mesh({"context": 4, "data": 2}), {}
    with jax.set_mesh(devices):
        q, k, v, dy = (jax.device_put(x, NamedSharding(devices, CUT)) for x in arguments())
        segments = jax.device_put(documents(), NamedSharding(devices, PartitionSpec(*CUT[:2])))
        for name, f in {"ring": ring, "plain": plain}.items():
            text = f.lower(q, k, v, segments, dy).compile().as_text()
            counted[name] = {
                kind: sum(f" {kind}{form}(" in line for line in text.splitlines() for form in ("", "-start"))
                for kind in ("collective-permute", "all-gather", "all-to-all", "all-reduce")
            }
    return counted


def measure():
    return {
        **{name: equality(*case) for name, case in CASES.items()},
        "causality": causality(),
        "rough": rough(),
        "rough, documents": rough(segments=documents()),
        "rough, documents, high scores": rough(scale=64.0, segments=documents()),
        "pipeline": pipeline(),
        "program": program(),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
    sys.exit()


@pytest.fixture(scope="module")
def found():
    return measured_on_eight_devices(__file__)


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_attention(found, name):
    sizes, _, packed = CASES[name]
    assert found[name]["zig-zag"]["y"] < 1e-5
    assert max(found[name]["zig-zag"].values()) < 1e-4
    assert (min(found[name]["natural"].values()) > 0.1) == (sizes["context"] > 1)
    assert (min(found[name]["one text"].values()) > 0.1) == packed


def test_no_place_sees_a_later_one(found):
    keys, values, order = (np.asarray(found["causality"][part]) for part in ("keys", "values", "order"))
    seen = np.tri(TIME, dtype=bool)
    np.testing.assert_array_equal(values, seen)
    assert not np.array_equal(values[np.ix_(order, order)], seen), "columns aren't places"
    keys[0, 0] = True  # the weight of an only key is 1 whatever the key, but for rounding
    np.testing.assert_array_equal(keys, seen)


@pytest.mark.parametrize("name", ["rough", "rough, documents"])
def test_bfloat16(found, name):
    assert found[name]["types"] == ["bfloat16"] * 4
    assert min(found[name]["errors"]) > 0
    assert max(found[name]["errors"]) < 0.02


def test_no_nan_where_scores_are_high(found):
    assert found["rough, documents, high scores"]["finite"]


def test_inside_a_pipeline(found):
    assert max(found["pipeline"]["zig-zag"]) < 1e-4
    assert min(found["pipeline"]["natural"]) > 0.1


def test_program_has_permutes_and_gathers_nothing(found):
    counted = found["program"]
    assert counted["ring"].pop("collective-permute") > 0
    assert set(counted["ring"].values()) == {0}
    assert counted["plain"]["all-gather"] > 0


# What a shard does and keeps can be read from a trace, which needs no devices.


def within(shards: int, **others: int):
    sizes = tuple({"context": shards, **others}.get(axis, 1) for axis in MESH_AXES)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(sizes, MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))
    )


def operations(jaxpr, times=1):
    """Each operation of a trace, and how many times it runs."""
    for equation in jaxpr.eqns:
        assert equation.primitive.name not in ("while", "cond"), "how much is done may depend on the shard"
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        yield equation, inner
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from operations(part, inner)


def dot_flops(equation) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    a, y = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * int(np.prod(y)) * int(np.prod([a[axis] for axis in contracted]))


def traced(f, shards: int, dtype=jnp.float32, **others: int):
    """Operations of forward, and of forward and backward together."""
    q, k, v, dy = (x.astype(dtype) for x in arguments())
    with within(shards, **others):
        forward = jax.make_jaxpr(f)(q, k, v, None)
        both = jax.make_jaxpr(lambda *x: jax.vjp(lambda *x: f(*x, None), *x[:3])[1](x[3]))(q, k, v, dy)
    return [list(operations(jaxpr.jaxpr)) for jaxpr in (forward, both)]


def plain_attention(q, k, v, segments):
    return attend(q, k, v, causal_mask(jnp.arange(q.shape[1]), segments))


def flops(found) -> int:
    return sum(dot_flops(equation) * times for equation, times in found if equation.primitive.name == "dot_general")


def count(found, name: str) -> int:
    return sum(times for equation, times in found if equation.primitive.name == name)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_half_the_work_of_the_dense_form(shards):
    """A shard's share of the dense form is 4 n products of chunks: here 3 with its own keys, 2 with each other's."""
    forward, both = traced(ring_attention, shards)
    dense, _ = traced(plain_attention, shards)
    products, chunk = 2 * shards + 1, TIME // (2 * shards)
    assert flops(forward) / (flops(dense) / shards) == products / (4 * shards)
    assert flops(both) - flops(forward) == products * 2 * BATCH * HEADS * chunk**2 * (3 * WIDTH + 2 * VALUES)


def test_each_step_is_half_of_the_dense_form():
    shards = 4
    forward, _ = traced(ring_attention, shards)
    dense, _ = traced(plain_attention, shards)
    [step] = [equation.params["jaxpr"].jaxpr for equation, _ in forward if equation.primitive.name == "scan"]
    assert flops(operations(step)) == flops(dense) / shards**2 / 2


@pytest.mark.parametrize("axis", ["data", "fsdp", "expert", "tensor"])
def test_every_axis_is_mapped(axis):
    """What is traced is the work of one device; an axis left to the partitioner would not show in it."""
    alone, cut = (traced(ring_attention, 2, **others) for others in ({}, {axis: 2}))
    assert [flops(found) for found in cut] == [flops(found) / 2 for found in alone]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_keys_go_round_once_forward_and_once_back(shards):
    forward, both = traced(ring_attention, shards)
    assert count(forward, "ppermute") == 2 * (shards - 1)
    gradients_home = 2 * shards
    assert count(both, "ppermute") - count(forward, "ppermute") == 2 * (shards - 1) + gradients_home


def test_program_does_not_grow_with_the_ring():
    def size(shards):
        return [len(found) for found in traced(ring_attention, shards)]

    assert size(4) == size(8)
    assert size(1) < size(4)


def test_products_of_bfloat16_are_summed_in_float32():
    def products(f):
        _, both = traced(f, 4, jnp.bfloat16)
        found = [equation for equation, _ in both if equation.primitive.name == "dot_general"]
        return [{str(x.aval.dtype) for x in end} for e in found for end in (e.invars, e.outvars)]

    ring_products = products(ring_attention)
    assert len(ring_products) > 10
    assert all(types == {"bfloat16"} for types in ring_products[::2])
    assert all(types == {"float32"} for types in ring_products[1::2])
    assert {"bfloat16"} in products(plain_attention)[1::2]


def test_no_scores_are_kept():
    """Kept from forward to backward are the arguments, the output and the log-sum-exp."""

    def kept(f):
        given = jax.eval_shape(lambda *x: jax.vjp(lambda *y: f(*y, x[3]), *x[:3])[1], q, k, v, documents())
        return sorted(x.shape for x in jax.tree.leaves(given))

    q, k, v, dy = arguments()
    with within(4):
        expected = [x.shape for x in (q, k, v, dy, documents())] + [(BATCH, TIME, HEADS)]
        assert kept(ring_attention) == sorted(expected)
        assert any(shape[-2:] == (TIME, TIME) for shape in kept(plain_attention))


def test_segments_have_no_gradient():
    q, k, v, dy = arguments()
    with within(2):
        gradients = jax.eval_shape(lambda *x: jax.vjp(ring_attention, *x)[1](dy), q, k, v, documents())
    assert [x.shape for x in gradients[:3]] == [q.shape, k.shape, v.shape]
    assert gradients[3].dtype == jax.dtypes.float0


def test_order():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert zigzag_order(6, 1).tolist() == list(range(6))


def test_order_of_what_cannot_be_cut():
    with pytest.raises(ValueError, match="a sequence of 12 can't be cut into 2 chunks for each of 4 shards"):
        zigzag_order(12, 4)
