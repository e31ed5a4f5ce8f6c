import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
from flax import nnx

from meshwright.models.attention import rotary_angles, rotate
from meshwright.models.decoder import REMAT, Decoder, parameter_count
from meshwright.models.layers import dropout
from meshwright.models.spec import ModelSpec, preset, presets

VOCAB = 61
SMALL = {
    "gpt2": preset("gpt2-tiny"),
    "minigpt": preset("minigpt-tiny").model_copy(update={"dropout": 0.0}),
    "llama": preset("llama-tiny"),
}


WINDOWED = preset("gemma3-tiny").model_copy(update={"window": 4, "global_every": 3})


def small(family: str, **changes) -> ModelSpec:
    sizes = {"vocab_size": VOCAB, "layers": 3, "width": 32, "heads": 4, "head_width": 8, "ffn_width": 48}
    kv_heads = 4 if family in ("gpt2", "minigpt") else 2
    spec = WINDOWED if family == "windowed" else SMALL[family]
    return spec.model_copy(update={**sizes, "kv_heads": kv_heads, "context_length": 32, **changes})


def noisy(spec: ModelSpec, seed: int = 0) -> Decoder:
    """See `random_models.noisy`."""
    return random_models.noisy(lambda: Decoder(spec, rngs=nnx.Rngs(seed)), seed)


# Compiled as a whole, which takes less time than each operation by itself.
hidden = nnx.jit(Decoder.hidden, static_argnames=("dtype", "scan_layers", "remat"))
decode = nnx.jit(Decoder.decode, static_argnames=("dtype", "from_start"))
scores = nnx.jit(Decoder.__call__, static_argnames="dtype")


def tokens(batch: int = 2, time: int = 12, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, time)))


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("gpt2", 50257, 124_439_808),
        ("gpt2-medium", 50257, 354_823_168),
        ("gpt2-large", 50257, 774_030_080),
        ("gpt2-xl", 50257, 1_557_611_200),
        ("llama-135m", 49152, 134_515_008),
        ("llama-360m", 49152, 361_821_120),
        ("llama-1b", 128256, 1_235_814_400),
    ],
)
def test_parameter_counts(name, vocab_size, count):
    assert parameter_count(preset(name).model_copy(update={"vocab_size": vocab_size})) == count


def test_minigpt_parameter_count_by_hand():
    spec = preset("minigpt").model_copy(update={"vocab_size": 50257})
    d, layers, vocab, time = 256, 8, 50257, 256
    attention, feed_forward, norms = 4 * (d * d + d), 2 * (d * d + d), 2 * 2 * d
    assert (
        parameter_count(spec) == vocab * d + time * d + layers * (attention + feed_forward + norms) + d * vocab + vocab
    )


def test_every_preset_is_a_model():
    for name, spec in presets().items():
        assert parameter_count(spec.model_copy(update={"vocab_size": 300})) > 0, name


@pytest.mark.parametrize("family", SMALL)
def test_equals_a_naive_numpy_model(family):
    spec = small(family)
    model, ids = noisy(spec), tokens()
    params = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    expected = np.stack([naive_logits(params, spec, row) for row in np.asarray(ids)])
    got = np.asarray(scores(model, ids))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


def naive_logits(params: dict, spec: ModelSpec, ids: np.ndarray) -> np.ndarray:
    """The model of one row, one position and one head at a time, straight from the papers."""

    def norm(x, p):
        if spec.norm == "rmsnorm":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * p["scale"]
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + spec.norm_eps) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0.0)

    def turn(x, position):
        half = spec.head_width // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / spec.head_width)
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def attention(x, p):
        q, k, v = (linear(x, p[name]) for name in ("query", "key", "value"))
        out = np.zeros((len(x), spec.heads * spec.head_width))
        for head in range(spec.heads):
            mine = slice(head * spec.head_width, (head + 1) * spec.head_width)
            shared = head // (spec.heads // spec.kv_heads)
            theirs = slice(shared * spec.head_width, (shared + 1) * spec.head_width)
            for t in range(len(x)):
                query, keys = q[t, mine], [k[s, theirs] for s in range(t + 1)]
                if spec.positions == "rotary":
                    query, keys = turn(query, t), [turn(key, s) for s, key in enumerate(keys)]
                products = np.array([query @ key / np.sqrt(spec.head_width) for key in keys])
                weights = np.exp(products - products.max())
                out[t, mine] = (weights / weights.sum()) @ v[: t + 1, theirs]
        return linear(out, p["out"])

    def mlp(x, p):
        up = linear(x, p["up"])
        if spec.activation == "swiglu":
            gate = linear(x, p["gate"])
            return linear(gate / (1 + np.exp(-gate)) * up, p["down"])
        if spec.activation == "relu":
            return linear(np.maximum(up, 0), p["down"])
        return linear(0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))), p["down"])

    x = params["embedding"][ids]
    if spec.positions == "learned":
        x = x + params["position_embedding"][: len(ids)]
    for layer in range(spec.layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        if spec.norm_placement == "pre":
            x = x + attention(norm(x, p["attention_norm"]), p["attention"])
            x = x + mlp(norm(x, p["mlp_norm"]), p["mlp"])
        else:
            x = norm(x + attention(x, p["attention"]), p["attention_norm"])
            x = norm(x + mlp(x, p["mlp"]), p["mlp_norm"])
    if spec.norm_placement == "pre":
        x = norm(x, params["final_norm"])
    return x @ params["embedding"].T if spec.tied_embeddings else linear(x, params["head"])


@pytest.mark.parametrize("family", SMALL)
def test_no_position_sees_the_future(family):
    spec = small(family, tied_embeddings=False)
    model, ids = noisy(spec), tokens(1, 8)

    @jax.jit
    @jax.grad
    def reach(embedding_rows, t):
        graph, params = nnx.split(model, nnx.Param)
        pure = nnx.to_pure_dict(params)
        changed = {**pure, "embedding": pure["embedding"].at[ids[0]].set(embedding_rows)}
        return nnx.merge(graph, changed)(ids)[0, t].sum()

    ids = ids.at[0].set(jnp.arange(8))  # all different, so each position has a row of its own
    rows = nnx.to_pure_dict(nnx.state(model, nnx.Param))["embedding"][ids[0]]
    for t in range(8):
        far = np.abs(np.asarray(reach(rows, t))).max(axis=-1)
        assert (far[: t + 1] > 1e-6).all()
        assert (far[t + 1 :] == 0).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_window_is_how_many_tokens_are_seen(dropout):
    spec = small("gpt2", layers=1, window=3, dropout=dropout, positions="rotary")
    model, keys_B = noisy(spec), jax.random.split(jax.random.key(0), 1)
    rows_BTD = model.embedded(jnp.arange(8)[None], jnp.float32)
    start = model.start(rows_BTD, None, None, None, jnp.float32, keys_B)
    apply = model.layer_function("none")
    params, told = jax.tree.map(lambda leaf: leaf[0], (nnx.split(model.blocks)[1], start.told_L))

    @jax.jit
    def reach(t):
        return jax.grad(lambda x_BTD: apply(params, x_BTD, start.places, told)[0][0, t].sum())(start.x_BTD)

    for t in range(8):
        seen = np.abs(np.asarray(reach(t))[0]).max(axis=-1) > 1e-6
        assert seen[t] and not seen[: max(0, t - 2)].any() and not seen[t + 1 :].any()
        assert dropout or seen[max(0, t - 2) : t].all()


@pytest.mark.parametrize("family", SMALL)
def test_every_parameter_has_a_gradient(family):
    model, ids = noisy(small(family)), tokens(4, 32)
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        return jnp.square(nnx.merge(graph, params)(ids) - 1.0).mean()

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        layers = np.abs(leaf) if name.startswith("blocks") else np.abs(leaf)[None]
        largest = layers.reshape(len(layers), -1).max(axis=1)
        if name == "blocks.attention.key.bias" and family != "llama":
            # A key's bias moves all scores of a query alike, which softmax doesn't see.
            assert (largest < 1e-4).all()
        else:
            assert (largest > 1e-4).all(), name


@pytest.mark.parametrize("family", SMALL)
def test_scanned_layers_equal_unrolled_ones(family):
    model, ids = noisy(small(family, dropout=0.3)), tokens()
    keys_B = jax.random.split(jax.random.key(0), 2)

    def run(scan_layers):
        return lambda: model.hidden(ids, dropout_keys_B=keys_B, scan_layers=scan_layers)[0]

    looped, unrolled = (jax.jit(run(scan_layers))() for scan_layers in (True, False))
    np.testing.assert_allclose(looped, unrolled, rtol=1e-5, atol=1e-5)
    assert " scan[" in str(jax.make_jaxpr(run(True))())
    assert " scan[" not in str(jax.make_jaxpr(run(False))())


@pytest.mark.parametrize("from_start", [False, True])
@pytest.mark.parametrize("family", SMALL)
def test_decoding_with_a_cache_equals_the_whole_text(family, from_start):
    model, ids = noisy(small(family)), tokens(2, 12)
    cache = model.empty_cache(2, 16)
    assert cache.keys_BKSC.shape == (3, 2, model.spec.kv_heads, 16, 8)
    pieces = []
    for start, stop in [(0, 5), (5, 6), (6, 7), (7, 12)]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        x_BTD, cache = decode(model, ids[:, start:stop], positions, cache, from_start=from_start and start == 0)
        pieces.append(model.logits(x_BTD))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), scores(model, ids), rtol=1e-4, atol=1e-4)


LATENT = preset("deepseek-tiny").model_copy(update={"vocab_size": VOCAB})


@pytest.mark.parametrize("spec", [small("llama"), small("windowed"), LATENT], ids=["llama", "windowed", "latent"])
def test_a_text_from_its_start_has_no_scores_of_the_rest_of_the_cache(spec):
    model = Decoder(spec, rngs=nnx.Rngs(0))
    ids, cache = tokens(2, 12), model.empty_cache(2, 29)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))

    def shapes(from_start: bool) -> set[str]:
        traced = jax.make_jaxpr(lambda: model.decode(ids, positions, cache, from_start=from_start)[0])()
        return set(re.findall(r"f32\[[0-9,]*,12,29\]", str(traced)))

    assert shapes(False)
    assert not shapes(True)


def test_scores_of_16_bit_activations_are_not_rounded():
    model = noisy(small("gpt2"))
    x_BTD = jax.random.normal(jax.random.key(0), (2, 3, model.spec.width), jnp.bfloat16)
    exact = np.float64(x_BTD) @ np.float64(model.head_weights()[0].astype(jnp.bfloat16))
    found = np.float64(model.logits(x_BTD))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(np.float64(jnp.bfloat16(exact)) - exact).max() > 1e-3


def test_rotary_scores_depend_on_distance_alone():
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(t, s):
        turn = [rotate(x, rotary_angles(jnp.array([[p]]), 16, 10_000.0)) for x, p in ((q, t), (k, s))]
        return float((turn[0] * turn[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_dropout_by_example():
    x, order_T = jnp.ones((4, 64, 64)), jnp.arange(64)
    keys = jax.random.split(jax.random.key(0), 4)
    whole = dropout(x, 0.25, keys, 1, order_T)
    np.testing.assert_array_equal(whole[2:], dropout(x[2:], 0.25, keys[2:], 1, order_T))
    np.testing.assert_array_equal(whole[:, ::-1], dropout(x, 0.25, keys, 1, order_T[::-1]))
    assert (whole != dropout(x, 0.25, keys, 2, order_T)).any()
    assert (whole[0] != whole[1]).any()
    assert (whole[:, 0] != whole[:, 1]).any()
    assert float((whole == 0).mean()) == pytest.approx(0.25, abs=0.02)
    assert float(whole.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_array_equal(dropout(x, 0.25, None, 1, order_T), x)


def test_dropout_reaches_each_layer_and_is_off_without_keys(monkeypatch):
    spec = small("gpt2", dropout=0.5)
    model, ids = noisy(spec), tokens()
    keys = jax.random.split(jax.random.key(0), 2)
    dropped, plain = hidden(model, ids, dropout_keys_B=keys)[0], hidden(model, ids)[0]
    assert np.abs(dropped - plain).max() > 1e-2
    np.testing.assert_array_equal(plain, hidden(noisy(small("gpt2")), ids)[0])
    start = model.start(model.embedded(ids, jnp.float32), None, None, None, jnp.float32, keys)
    drawn = {tuple(data) for data in np.asarray(jax.random.key_data(start.told_L.dropout_keys_B)).reshape(3 * 2, -1)}
    assert len(drawn) == 3 * 2  # each layer and each example has its own

    def through_layers(keys_LB):
        told_L = start.told_L._replace(dropout_keys_B=keys_LB)
        monkeypatch.setattr(Decoder, "start", lambda *_: start._replace(told_L=told_L))
        return np.asarray(model.hidden(ids)[0])

    once = jax.random.split(jax.random.key(1), (3, 2))
    other_last = once.at[2].set(once[1])
    assert np.abs(through_layers(once) - through_layers(None)).max() > 1e-2
    assert np.abs(through_layers(once) - through_layers(other_last)).max() > 1e-2  # and a layer uses its own


@pytest.mark.parametrize("family", SMALL)
def test_bfloat16_is_near_float32(family):
    model, ids = Decoder(small(family), rngs=nnx.Rngs(0)), tokens()
    exact = np.asarray(hidden(model, ids)[0], np.float64)
    rough = hidden(model, ids, dtype=jnp.bfloat16)[0]
    assert rough.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(rough, np.float64) - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 1e-2


def test_same_seed_same_parameters_other_seed_others():
    def first(seed):
        return np.asarray(Decoder(small("gpt2"), rngs=nnx.Rngs(params=seed)).blocks.mlp.up.kernel[...])

    np.testing.assert_array_equal(first(0), first(0))
    assert (first(0) != first(1)).any()
    assert (first(0)[0] != first(0)[1]).any()  # layers don't start alike


PACKED = [[5, 4, 3], [2, 10]]  # lengths of the documents in each row


def packed() -> tuple[jax.Array, jax.Array]:
    """Positions, each document's from 0, and segments; the numbers of the segments are in no order."""
    positions_BT = np.array([np.concatenate([np.arange(length) for length in row]) for row in PACKED])
    segments_BT = np.array([np.repeat([7, 2, 9][: len(row)], row) for row in PACKED])
    return jnp.asarray(positions_BT), jnp.asarray(segments_BT)


@pytest.mark.parametrize("family", [*SMALL, "windowed"])
def test_packed_documents_equal_documents_one_by_one(family):
    model, ids = noisy(small(family)), tokens(2, 12)
    positions_BT, segments_BT = packed()
    run = nnx.jit(lambda model, ids, **more: model(ids, **more))
    got = run(model, ids, positions_BT=positions_BT, segments_BT=segments_BT)
    for row, lengths in enumerate(PACKED):
        borders = np.cumsum([0, *lengths])
        for start, stop in pairwise(borders):
            alone = run(model, ids[row : row + 1, start:stop])[0]
            np.testing.assert_allclose(got[row, start:stop], alone, rtol=1e-4, atol=1e-4)
    first = segments_BT == 7  # it has nothing before it
    for less in ({"positions_BT": positions_BT}, {"segments_BT": segments_BT}):
        other = np.abs(run(model, ids, **less) - got).max(axis=-1)
        np.testing.assert_allclose(other[first], 0, atol=1e-4)
        relative = less.keys() == {"segments_BT"} and family in (
            "llama",
            "windowed",
        )  # rotary positions tell distances only
        assert (other[~first].max() > 1e-2) != relative


def test_packed_documents_stay_apart_under_dropout():
    model, ids, (positions_BT, segments_BT) = noisy(small("gpt2", dropout=0.3)), tokens(2, 12), packed()
    keys_B = jax.random.split(jax.random.key(0), 2)
    run = nnx.jit(lambda model, ids, **more: model.hidden(ids, dropout_keys_B=keys_B, **more)[0])
    others = jnp.where(segments_BT == 2, ids, (ids + 1) % VOCAB)
    more = {"positions_BT": positions_BT, "segments_BT": segments_BT}
    same = np.abs(run(model, ids, **more) - run(model, others, **more)).max(axis=-1) < 1e-5
    np.testing.assert_array_equal(same, segments_BT == 2)
    more.pop("segments_BT")
    assert not (np.abs(run(model, ids, **more) - run(model, others, **more)).max(axis=-1) < 1e-5).any()


def equations(jaxpr) -> list:
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += equations(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(("family", "dropout", "scan_layers"), [("gpt2", 0.2, True), ("llama", 0.0, False)])
def test_remat_changes_what_is_kept_and_nothing_else(family, dropout, scan_layers):
    model, ids = noisy(small(family, layers=2, dropout=dropout)), tokens()
    graph, params = nnx.split(model, nnx.Param)
    keys_B = jax.random.split(jax.random.key(0), 2)
    losses, gradients, kept, products = {}, {}, {}, {}
    for remat in REMAT:

        def loss(params, remat=remat):
            model = nnx.merge(graph, params)
            x_BTD, _ = model.hidden(ids, dropout_keys_B=keys_B, scan_layers=scan_layers, remat=remat)
            return jnp.square(model.logits(x_BTD) - 1.0).mean()

        losses[remat], gradients[remat] = jax.jit(jax.value_and_grad(loss))(params)
        for_backward = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(for_backward))
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
        products[remat] = sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))
    for remat in ("full", "products"):
        np.testing.assert_allclose(losses[remat], losses["none"], rtol=1e-5)
        for got, want in zip(jax.tree.leaves(gradients[remat]), jax.tree.leaves(gradients["none"]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradients["none"]["blocks"]["mlp"]))
    assert kept["full"] < kept["products"] < kept["none"], kept
    assert products["full"] > products["products"] > products["none"], products
