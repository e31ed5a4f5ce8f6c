"""The kernels for one token of each text, interpreted on the CPU, against the blocks that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_values

from meshwright.config import make_run
from meshwright.engines.base import Sampling
from meshwright.engines.jax import decode
from meshwright.engines.jax.engine import JaxEngine
from meshwright.models import kernels, one_token
from meshwright.models.attention import LayerCache, Places, rotary_angles
from meshwright.models.decoder import Block
from meshwright.models.layout import Layout, use_layout
from meshwright.models.spec import preset

SIZES = {"width": 128, "heads": 4, "kv_heads": 2, "head_width": 32, "ffn_width": 192, "layers": 2, "vocab_size": 61}
ODD = {"width": 192, "heads": 3, "kv_heads": 3, "head_width": 64, "ffn_width": 320}
MODELS = {
    "llama": {"preset": "llama-tiny", **SIZES},
    "llama with biases": {"preset": "llama-tiny", **SIZES, "bias": True},
    "qwen2": {"preset": "qwen2-tiny", **SIZES},
    "mistral": {"preset": "mistral-tiny", **SIZES, "window": 5},
    "a head a key": {"preset": "llama-tiny", **SIZES, "kv_heads": 4},
    "gpt2": {"preset": "gpt2-tiny", **SIZES, "kv_heads": 4},
    "qwen3": {"preset": "qwen3-tiny", **SIZES},
    "gelu with a gate": {"preset": "llama-tiny", **SIZES, "activation": "geglu"},
    "relu": {"preset": "gpt2-tiny", **SIZES, "activation": "relu"},
    "widths of no power of two": {"preset": "gpt2-tiny", **SIZES, **ODD},
    "three queries a key": {"preset": "llama-tiny", **SIZES, **ODD, "kv_heads": 2, "head_width": 32, "heads": 6},
}
OTHERS = {
    "norms after": {"preset": "minigpt-tiny", **SIZES, "kv_heads": 4},
    "norms of all heads": {"preset": "olmo2-tiny", **SIZES},
    "more norms": {"preset": "gemma2-tiny", **SIZES},
    "experts": {"preset": "moe-tiny", **SIZES},
    "latent attention": {"preset": "deepseek-tiny"},
    "a width of no whole tiles": {"preset": "llama-tiny", **SIZES, "ffn_width": 200},
    "another width of no whole tiles": {"preset": "llama-tiny", **SIZES, "width": 96},
    "bounded scores": {"preset": "llama-tiny", **SIZES, "attention_softcap": 5.0},
    "narrow heads": {"preset": "llama-tiny", **SIZES, "head_width": 16, "kv_heads": 4},
    "wide heads": {"preset": "llama-tiny", **SIZES, "head_width": 256},
    "heads of no power of two": {"preset": "llama-tiny", **SIZES, "head_width": 48, "heads": 4, "kv_heads": 4},
}


@pytest.fixture
def there_are_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda: 9.0)
    monkeypatch.setattr(one_token, "_TYPES", (jnp.float32,))


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def block_of(name):
    model = dict((MODELS | OTHERS)[name])
    spec = preset(model.pop("preset")).model_copy(update={**model, "norm_eps": 0.1})
    return stirred(Block(spec, rngs=nnx.Rngs(0)), 0.1)


def stirred(tree, share):
    """Each leaf moved in its own way: of zeros, ones and equals a mistake in them doesn't show."""
    leaves, structure = jax.tree.flatten(tree)
    moved = [leaf + share * random(*leaf.shape, seed=seed) for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, moved)


def layer_of(block, positions, length, window=None):
    spec, batch = block.spec, len(positions)
    positions_BT = jnp.asarray(positions)[:, None]
    angles = rotary_angles(positions_BT, spec.head_width, 1e4) if spec.positions == "rotary" else None
    shape = (batch, spec.kv_heads, length, spec.head_width)
    # What lies beyond a token's position is no text's: it must not be looked at.
    past = jnp.arange(length)[None, None, :, None] < positions_BT[:, :, None, None]
    cache = LayerCache(*(jnp.where(past, random(*shape, seed=seed), 1e6) for seed in (1, 2)))
    return one_token.Layer(block, Places(positions_BT, jnp.arange(1), angles, window=window), cache)


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_block(name, window):
    layer = layer_of(block_of(name), [0, 63, 64, 129], 150, window)
    x_B1D = random(4, 1, layer.block.spec.width, seed=3)
    wanted, cache, _ = layer.block(x_B1D, layer.places, None, layer.cache)
    got, [written] = one_token.through([layer], x_B1D)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    for part, wanted_part, before in zip(written, cache, layer.cache, strict=True):
        np.testing.assert_allclose(part, wanted_part, rtol=1e-5, atol=1e-5)
        assert (np.asarray(part != before).any(axis=-1).sum(axis=-1) == 1).all()  # one position of each head
    assert float(jnp.abs(wanted - x_B1D).max()) > 0.1


def test_a_window_counts():
    block, x_B1D = block_of("mistral"), random(4, 1, 128, seed=3)
    whole, near = (
        one_token.through([layer_of(block, [0, 63, 64, 129], 150, window)], x_B1D)[0] for window in (None, 5)
    )
    np.testing.assert_array_equal(whole[0], near[0])  # at position 0 there is nothing to leave out
    assert float(jnp.abs(whole[1:] - near[1:]).max()) > 1e-3


def test_layers_one_after_another_and_products_in_parts():
    layers = [layer_of(block_of(name), [3, 80], 96) for name in ("llama", "qwen2")]
    assert one_token._parts(2, 256) == 4 and one_token._parts(512, 256) == 1 and one_token._parts(2, 192) == 1
    x_B1D = wanted = random(2, 1, 128, seed=3)
    for layer in layers:
        wanted = layer.block(wanted, layer.places, None, layer.cache)[0]
    got, caches = one_token.through(layers, x_B1D)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(caches) == 2


@pytest.mark.usefixtures("there_are_kernels")
def test_where_it_applies(monkeypatch):
    x_B1D = random(2, 1, 128)
    for name in MODELS:
        assert one_token.applies([layer_of(block_of(name), [3, 4], 64)], x_B1D), name
    for name in OTHERS:
        block = block_of(name)
        cache = block.attention.empty_cache(block.spec, 2, 64, jnp.float32)
        assert not one_token.applies([one_token.Layer(block, None, cache)], x_B1D), name
    layer = layer_of(block_of("llama"), [3, 4], 64)
    assert not one_token.applies([layer], random(2, 2, 128))
    assert not one_token.applies([layer], random(65, 1, 128))
    assert not one_token.applies([layer], x_B1D.astype(jnp.float16))

    class Mine(Block):
        pass

    mine = Mine(layer.block.spec, rngs=nnx.Rngs(0))
    assert not one_token.applies([layer, layer._replace(block=mine)], x_B1D)
    adapted = block_of("llama")
    adapted.mlp.up.lora = "an adapter"
    assert not one_token.applies([layer._replace(block=adapted)], x_B1D)
    long = layer._replace(cache=block_of("llama").attention.empty_cache(layer.block.spec, 2, 2049, jnp.float32))
    assert not one_token.applies([layer, long], x_B1D)
    on_a_mesh = Layout()
    on_a_mesh.on_one_device = lambda: False
    with use_layout(on_a_mesh):
        assert not one_token.applies([layer], x_B1D)
    monkeypatch.setattr(kernels, "capability", lambda: 7.5)
    assert not one_token.applies([layer], x_B1D)


@pytest.mark.usefixtures("there_are_kernels")
@pytest.mark.parametrize("where", ["mlp_norm", "attention.out", "attention.query_norm", "mlp.gate"])
def test_parts_of_a_researchers_own_count(where):
    block = block_of("qwen3")
    layer, x_B1D = layer_of(block, [3, 4], 64), random(2, 1, 128)
    assert one_token.applies([layer], x_B1D)
    of, name = (getattr(block, where.split(".")[0]), where.split(".")[1]) if "." in where else (block, where)
    part = getattr(of, name)
    part.__class__ = type("Mine", (type(part),), {})
    assert not one_token.applies([layer], x_B1D)


def test_a_token_beyond_the_end_of_the_cache_is_not_written(monkeypatch):
    layer = layer_of(block_of("llama"), [20, 64, 70], 64)
    store = kernels.triton.store
    # The interpreter wouldn't write it anyhow, and a GPU would.
    monkeypatch.setattr(kernels.triton, "store", lambda ref, value, *, mask: store(ref, value, mask=mask))
    _, [written] = one_token.through([layer], random(3, 1, 128))
    for part, before in zip(written, layer.cache, strict=True):
        np.testing.assert_array_equal(part[1:], before[1:])
        assert (part[0] != before[0]).any()


@pytest.mark.usefixtures("there_are_kernels")
@pytest.mark.parametrize("in_one_go", [False, True])
def test_text_is_the_same(monkeypatch, in_one_go):
    run = make_run(run_values("x", model=MODELS["mistral"]))
    engine = JaxEngine(run, run.model.spec, training=False)
    engine._state = engine._state._replace(params=stirred(engine._state.params, 0.2))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 30, 40]]
    calls = []
    monkeypatch.setattr(
        one_token, "through", lambda *given, through=one_token.through: calls.append(1) or through(*given)
    )
    monkeypatch.setattr(decode, "_in_one_go", lambda: in_one_go)
    with_kernels = list(engine.generate(prompts, 20, 7, Sampling(temperature=0.0)))
    assert calls
    monkeypatch.setattr(one_token, "applies", lambda *_: False)
    monkeypatch.setattr(decode, "_in_one_go", lambda: False)
    plain = JaxEngine(run, run.model.spec, training=False)
    plain._state = engine._state
    assert with_kernels == list(plain.generate(prompts, 20, 7, Sampling(temperature=0.0)))
    assert len({tuple(row) for row in zip(*with_kernels, strict=True)}) == 3


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_as_many_tokens_as_are_asked_for_in_one_go(monkeypatch, count):
    run = make_run(run_values("x", model=MODELS["llama"]))
    engine = JaxEngine(run, run.model.spec, training=False)
    prompts = [[1, 2, 3], [9] * (64 - count)]  # of which the second fills the context up
    asked = list(engine.generate(prompts, count, -1, Sampling(temperature=0.0)))
    used = []
    monkeypatch.setattr(decode, "_in_one_go", lambda: used.append(True) or True)
    again = JaxEngine(run, run.model.spec, training=False)
    assert list(again.generate(prompts, count, -1, Sampling(temperature=0.0))) == asked
    assert len(asked) == count
    assert used or count == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MODELS)
def test_triton_takes_the_kernels(monkeypatch, name, dtype):
    # The interpreter takes more than Triton does; lowering for a GPU needs none.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    layer = layer_of(block_of(name), [0, 63, 64], 150, window=5)
    layer = layer._replace(cache=jax.tree.map(lambda part: part.astype(dtype), layer.cache))
    lowered = jax.jit(lambda x_B1D: one_token.through([layer], x_B1D)).trace(
        random(3, 1, layer.block.spec.width).astype(dtype)
    )
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 7


def test_tokens_too_many_go_where_the_last_one_went(monkeypatch):
    monkeypatch.setattr(decode, "_in_one_go", lambda: True)
    run = make_run(run_values("x", model=MODELS["llama"]))
    engine = JaxEngine(run, run.model.spec, training=False)
    greedy, lengths_B = Sampling(temperature=0.0), np.array([3, 5], np.int32)
    generator, tokens_BP = decode.Generator(engine._program), np.where(np.arange(8) < lengths_B[:, None], 1, 2)
    prepared = generator._prepare(engine._state.params)
    _, rows = generator._prefill(prepared, tokens_BP, lengths_B, np.zeros(2, bool), -1, greedy, 64, "likeliest")
    before = np.array(rows.cache_L[0].keys_BKSC)  # a copy: the cache is written where it lies
    _, rows = generator._go_on(prepared, rows, lengths_B, 4, -1, greedy, "likeliest")
    changed_BS = (before != np.asarray(rows.cache_L[0].keys_BKSC)).any(axis=(1, 3))
    for row, length in zip(changed_BS, lengths_B, strict=True):
        assert np.flatnonzero(row).tolist() == list(range(length, length + 4))
