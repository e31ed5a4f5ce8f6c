"""Multi-head latent attention against the equations of the paper, and what it promises of its cache."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_models import noisy

from meshwright.models.attention import Places, rotary_angles
from meshwright.models.decoder import Decoder
from meshwright.models.latent import LatentAttention, LatentCache
from meshwright.models.spec import ModelSpec, preset

VOCAB, LAYERS, HEADS, LATENT, ROTARY = 61, 2, 4, 12, 6
VARIANTS = {
    "latent queries": {},
    "direct queries": {"query_latent": 0},
    "values as wide as keys": {"value_width": 0},
}


def small(**changes) -> ModelSpec:
    sizes = {"vocab_size": VOCAB, "layers": LAYERS, "width": 32, "heads": HEADS, "head_width": 8, "ffn_width": 24}
    latents = {"kv_latent": LATENT, "query_latent": 10, "rotary_width": ROTARY, "value_width": 5}
    rest = {"context_length": 32, "experts": 0, "shared_experts": 0}
    return ModelSpec.model_validate({**preset("deepseek-tiny").model_dump(), **sizes, **latents, **rest, **changes})


def attention(**changes) -> LatentAttention:
    return noisy(lambda: LatentAttention(small(**changes), std=0.02, out_std=0.02, rngs=nnx.Rngs(0)))


def decoder(**changes) -> Decoder:
    return noisy(lambda: Decoder(small(**changes), rngs=nnx.Rngs(0)))


def tokens(batch: int = 2, time: int = 12) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (batch, time)))


def stream(batch: int = 2, time: int = 7) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).standard_normal((batch, time, 32)), jnp.float32)


def places(batch: int, time: int, start: int = 0) -> Places:
    positions_BT = jnp.broadcast_to(jnp.arange(start, start + time), (batch, time))
    return Places(positions_BT, jnp.arange(time), rotary_angles(positions_BT, ROTARY, 10_000.0))


# Compiled as a whole: one small program for each operation takes longer.
decode = nnx.jit(Decoder.decode, static_argnames=("dtype", "from_start"))


@partial(nnx.jit, static_argnames="dtype")
def hidden(model: Decoder, ids: jax.Array, **more) -> jax.Array:
    return model.hidden(ids, **more)[0]


@nnx.jit
def logits(model: Decoder, ids: jax.Array, **more) -> jax.Array:
    return model(ids, **more)


@nnx.jit
def apply(model: LatentAttention, x_BTD: jax.Array, places: Places, keys_B=None, cache=None):
    return model(x_BTD, places, keys_B, cache)


def pure(module: nnx.Module) -> dict:
    return jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_equations_of_the_paper(variant):
    model, x_BTD = attention(**VARIANTS[variant]), stream()
    expected = np.stack([naive(pure(model), model.spec, row) for row in np.float64(x_BTD)])
    assert np.abs(expected).max() > 1
    whole, none = apply(model, x_BTD, places(2, 7))
    assert none is None
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)
    cached, _ = apply(model, x_BTD, places(2, 7), cache=LatentAttention.empty_cache(model.spec, 2, 9, jnp.float32))
    np.testing.assert_allclose(cached, expected, rtol=1e-4, atol=1e-4)


def naive(params: dict, spec: ModelSpec, x_TD: np.ndarray) -> np.ndarray:
    """One row, one position and one head at a time; numbers are those of the equations in DeepSeek-V2's paper."""
    values = spec.value_width or spec.head_width

    def kernel(name):
        return params[name]["kernel"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean() + spec.norm_eps) * params[name]["scale"]

    def turn(x, position):
        half, out = ROTARY // 2, np.empty_like(x)
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / ROTARY)
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    outputs = []
    for t, x in enumerate(x_TD):
        q = norm(x @ kernel("query_latent"), "query_norm") if spec.query_latent else x  # (37)
        heads = []
        for head in range(spec.heads):
            wide = spec.head_width + ROTARY
            mine = (q @ kernel("query"))[head * wide : (head + 1) * wide]  # (38), (39)
            query = np.concatenate([mine[: spec.head_width], turn(mine[spec.head_width :], t)])  # (40)
            scores, seen = [], []
            for s in range(t + 1):
                latent = norm(x_TD[s] @ kernel("kv_latent"), "kv_norm")  # (41)
                columns = slice(head * spec.head_width, (head + 1) * spec.head_width)
                shared = turn(x_TD[s] @ kernel("rotated_key"), s)  # (43)
                key = np.concatenate([latent @ kernel("key")[:, columns], shared])  # (42), (44)
                scores.append(query @ key / np.sqrt(spec.head_width + ROTARY))
                seen.append(latent @ kernel("value")[:, head * values : (head + 1) * values])  # (45)
            weights = np.exp(np.array(scores) - max(scores))
            heads.append(weights / weights.sum() @ np.array(seen))  # (46)
        outputs.append(np.concatenate(heads) @ kernel("out"))  # (47)
    return np.stack(outputs)


def test_shapes_axes_and_initial_size_of_the_parameters():
    spec = small(width=256, kv_latent=64, query_latent=48)
    made = nnx.jit(lambda: LatentAttention(spec, std=0.02, out_std=0.005, rngs=nnx.Rngs(0)))()
    kernels = {
        "query_latent": ((256, 48), ("width", None)),
        "query": ((48, HEADS * (8 + ROTARY)), ("latent", "heads")),
        "kv_latent": ((256, 64), ("width", None)),
        "rotated_key": ((256, ROTARY), ("width", None)),
        "key": ((64, HEADS * 8), ("latent", "heads")),
        "value": ((64, HEADS * 5), ("latent", "heads")),
        "out": ((HEADS * 5, 256), ("heads", "width")),
    }
    for name, (shape, axes) in kernels.items():
        kernel = getattr(made, name).kernel
        assert (kernel.shape, kernel.axes) == (shape, axes), name
        assert float(kernel[...].std()) == pytest.approx(0.005 if name == "out" else 0.02, rel=0.1), name
    others = {"query_norm": {"scale": (48,)}, "kv_norm": {"scale": (64,)}}
    expected = {**{name: {"kernel": shape} for name, (shape, _) in kernels.items()}, **others}
    assert jax.tree.map(np.shape, pure(made)) == expected  # nothing besides: no biases
    direct = attention(query_latent=0)
    assert direct.query.kernel.axes == ("width", "heads")
    assert "query_latent" not in pure(direct)
    assert "query_norm" not in pure(direct)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("from_start", [False, True])
@pytest.mark.parametrize("borders", [[0, 5, 6, 7, 12], list(range(13))], ids=["in chunks", "token by token"])
def test_decoding_with_a_cache_equals_the_whole_text(variant, borders, from_start):
    model, ids = decoder(**VARIANTS[variant]), tokens()
    cache, pieces = model.empty_cache(2, 16), []
    for start, stop in pairwise(borders):
        positions_BT = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        x_BTD, cache = decode(model, ids[:, start:stop], positions_BT, cache, from_start=from_start and start == 0)
        pieces.append(model.logits(x_BTD))
    expected = logits(model, ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, rtol=1e-4, atol=1e-4)


def test_decoding_with_experts_equals_the_whole_text():
    model, ids = decoder(experts=4, shared_experts=1), tokens()
    first, cache = decode(model, ids[:, :6], jnp.broadcast_to(jnp.arange(6), (2, 6)), model.empty_cache(2, 12))
    second, _ = decode(model, ids[:, 6:], jnp.broadcast_to(jnp.arange(6, 12), (2, 6)), cache)
    expected = hidden(model, ids)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), expected, rtol=1e-4, atol=1e-4)


def test_rows_at_different_positions_share_a_batch():
    model, ids, lengths_B = decoder(), tokens(3), np.array([5, 3, 1])
    expected, rows = logits(model, ids), np.arange(3)
    padded = jnp.where(jnp.arange(5) < lengths_B[:, None], ids[:, :5], VOCAB - 1)  # the padding goes into the cache too
    x_BTD, cache = decode(model, padded, jnp.broadcast_to(jnp.arange(5), (3, 5)), model.empty_cache(3, 16))
    got = model.logits(x_BTD)[rows, lengths_B - 1]
    np.testing.assert_allclose(got, expected[rows, lengths_B - 1], rtol=1e-4, atol=1e-4)
    for step in range(6):
        at = lengths_B + step
        x_BTD, cache = decode(model, ids[rows, at][:, None], jnp.asarray(at)[:, None], cache)
        np.testing.assert_allclose(model.logits(x_BTD)[:, 0], expected[rows, at], rtol=1e-4, atol=1e-4)


def test_the_cache_is_one_latent_vector_and_one_rotated_key_a_token():
    cache = decoder().empty_cache(3, 16, jnp.bfloat16)
    assert isinstance(cache, LatentCache)
    assert cache.latents_BSZ.shape == (LAYERS, 3, 16, LATENT)
    assert cache.rotated_BSR.shape == (LAYERS, 3, 16, ROTARY)
    for spec in (small(), small(heads=2, kv_heads=2), small(head_width=16, value_width=9), preset("deepseek-1b")):
        made = jax.eval_shape(lambda spec=spec: LatentAttention.empty_cache(spec, 3, 16, jnp.bfloat16))
        assert sum(leaf.size for leaf in jax.tree.leaves(made)) == 3 * 16 * (spec.kv_latent + spec.rotary_width)
        assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype(jnp.bfloat16)}


def equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def results(function, *arguments) -> list:
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [(equation.primitive.name, out.aval) for equation in equations(jaxpr) for out in equation.outvars]


def test_decoding_makes_no_keys_or_values_of_cached_tokens():
    cached, model = 29, attention()
    graph, params = nnx.split(model, nnx.Param)
    per_head = cached * HEADS * 5  # what values of all heads would be, the narrowest of what is avoided

    def of_cached_tokens(time, cache):
        def run(params, x_BTD):
            return nnx.merge(graph, params)(x_BTD, places(1, time, start=3), cache=cache)

        found = results(run, params, stream(1, time))
        return max(aval.size for _, aval in found if cached in aval.shape)

    assert of_cached_tokens(1, LatentAttention.empty_cache(model.spec, 1, cached, jnp.float32)) < per_head
    assert of_cached_tokens(cached, None) >= per_head


def test_scores_and_softmax_are_exact_in_bfloat16():
    model = attention()
    cache = LatentAttention.empty_cache(model.spec, 1, 29, jnp.bfloat16)

    def run(x_BTD):
        return model(x_BTD, places(1, 3), cache=cache)[0]

    found = results(run, stream(1, 3).astype(jnp.bfloat16))
    scores = [aval for name, aval in found if name in ("dot_general", "exp") and 29 in aval.shape]
    assert len(scores) == 3  # latent scores, rotary scores, softmax
    assert {aval.dtype for aval in scores} == {jnp.dtype(jnp.float32)}


def test_bfloat16_is_near_float32():
    model, ids = decoder(), tokens()
    positions_BT = jnp.broadcast_to(jnp.arange(12), (2, 12))
    exact = np.asarray(hidden(model, ids), np.float64)
    rough = hidden(model, ids, dtype=jnp.bfloat16)
    cached, cache = decode(model, ids, positions_BT, model.empty_cache(2, 16, jnp.bfloat16), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}
    for got in (rough, cached):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 3e-2, error


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_the_future(variant):
    model, time = decoder(**VARIANTS[variant]), 8
    graph, params = nnx.split(model, nnx.Param)
    values, ids = nnx.to_pure_dict(params), jnp.arange(time)  # all different, so each position has a row of its own

    def scores(rows):
        changed = {**values, "embedding": values["embedding"].at[ids].set(rows)}
        return nnx.merge(graph, changed)(ids[None])[0]

    reach = np.abs(jax.jit(jax.jacrev(scores))(values["embedding"][ids]))  # [T, V, T', D]
    reach = reach.max(axis=(1, 3))
    assert (reach[np.tril_indices(time)] > 1e-3).all()
    assert (reach[np.triu_indices(time, 1)] == 0).all()


def test_documents_of_a_row_do_not_see_each_other():
    model, ids, lengths = decoder(), tokens(1, 12), [5, 4, 3]
    segments_BT = jnp.asarray(np.repeat([7, 2, 9], lengths))[None]
    positions_BT = jnp.concatenate([jnp.arange(length) for length in lengths])[None]
    packed = logits(model, ids, segments_BT=segments_BT, positions_BT=positions_BT)[0]
    starts = np.cumsum([0, *lengths[:-1]])
    each_first = jnp.concatenate([jnp.roll(ids, -start, axis=1) for start in starts])
    alone = logits(model, each_first)  # what comes after a document doesn't reach it
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        np.testing.assert_allclose(packed[start : start + length], alone[row, :length], rtol=1e-4, atol=1e-4)
    assert np.abs(packed - logits(model, ids, positions_BT=positions_BT)[0])[5:].max() > 1e-1


def test_scores_depend_on_distance_alone():
    model, ids = decoder(), tokens()
    plain, positions_BT = logits(model, ids), jnp.arange(12)[None]
    np.testing.assert_allclose(logits(model, ids, positions_BT=positions_BT + 100), plain, rtol=1e-3, atol=1e-3)
    assert np.abs(logits(model, ids, positions_BT=2 * positions_BT) - plain).max() > 1e-1
    shifted_BT = jnp.concatenate([positions_BT[:, :6], positions_BT[:, 6:] + 1], axis=1)
    assert np.abs(logits(model, ids, positions_BT=shifted_BT) - plain).max() > 1e-1


@pytest.mark.parametrize("variant", ["latent queries", "direct queries"])
def test_every_parameter_has_a_gradient(variant):
    model, ids = decoder(**VARIANTS[variant]), tokens(4, 24)
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        return jnp.square(nnx.merge(graph, params)(ids) - 1.0).mean()

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    paths = jax.tree_util.tree_flatten_with_path(gradients)[0]
    assert len(paths) == len(jax.tree.leaves(params))
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        layers = np.abs(leaf) if name.startswith("blocks") else np.abs(leaf)[None]
        assert (layers.reshape(len(layers), -1).max(axis=1) > 1e-4).all(), name
        if name.endswith("kernel") or name.endswith("scale"):
            assert (layers.reshape(-1, layers.shape[-1]).max(axis=0) > 0).all(), name  # each head's columns


def test_dropout_by_example():
    model, batch = attention(dropout=0.4), 2000
    keys_B = jax.random.split(jax.random.key(0), batch)
    x_BTD = jnp.concatenate([stream(2), jnp.broadcast_to(stream(1), (batch - 2, 7, 32))])
    whole, _ = apply(model, x_BTD, places(1, 7), keys_B)
    elsewhere = jnp.concatenate([jnp.arange(100, batch), jnp.arange(100)])  # the first rows among others
    moved, _ = apply(model, x_BTD[elsewhere].at[:-100].add(1), places(1, 7), keys_B[elsewhere])
    np.testing.assert_allclose(whole[:100], moved[-100:], rtol=1e-4, atol=1e-4)
    assert np.abs(whole[2] - whole[3]).max() > 1e-1  # same text, other key
    plain, _ = apply(model, x_BTD[:4], places(1, 7))
    assert (np.abs(whole[:4] - plain).max(axis=(1, 2)) > 1e-1).all()
    np.testing.assert_allclose(whole[2:].mean(axis=0), plain[-1], atol=0.2)
    assert np.abs(whole[2:].std(axis=0)).max() > 1
