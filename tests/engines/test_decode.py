import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_values

from meshwright.config import make_run
from meshwright.engines.base import Sampling
from meshwright.engines.jax.decode import bucket, prepared_model, sample, way_of
from meshwright.engines.jax.engine import JaxEngine
from meshwright.errors import UserError

VOCAB = 61
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=["gpt2-tiny", "minigpt-tiny", "llama-tiny", "deepseek-tiny"])
def engine(request) -> JaxEngine:
    changes = {"kv_heads": 2, "vocab_size": VOCAB, "dropout": 0.0, "tied_embeddings": False}
    run = make_run(run_values("x", model={"preset": request.param, **changes}))
    made = JaxEngine(run, run.model.spec, training=False)
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), made._state.params)
    made._state = made._state._replace(params=params)  # an untrained model says the same whatever came before
    return made


one_of_them = pytest.mark.parametrize("engine", ["llama-tiny"], indirect=True)  # what comes after the model's scores


def generate(engine, prompts, count, sampling=GREEDY, stop=-1):
    rows = [[] for _ in prompts]
    for tokens in engine.generate(prompts, count, stop, sampling):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def recomputed(engine, prompt, count):
    """Greedy continuation from the whole text each time, without a cache."""
    logits = jax.jit(lambda params, text: nnx.merge(engine._program.state.graph, params)(text[None])[0])
    text = np.zeros(64, np.int32)  # what comes after a position doesn't reach it, so zeros will do
    text[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + count):
        text[end] = jnp.argmax(logits(engine._state.params, text)[end - 1])
    return text[len(prompt) : len(prompt) + count].tolist()


def test_equals_recomputing_without_a_cache(engine):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 30, 40]]
    together = generate(engine, prompts, 12)
    for prompt, row in zip(prompts, together, strict=True):
        assert row == recomputed(engine, prompt, 12)
        assert row == generate(engine, [prompt], 12)[0]
    assert len({tuple(row) for row in together}) == 3
    assert len(set(together[0])) > 1


def test_experts_with_little_room_drop_nothing_for_a_longer_neighbour():
    model = {"preset": "moe-tiny", "vocab_size": VOCAB, "capacity_factor": 0.25, "context_length": 128}
    run = make_run(run_values("x", model=model))
    engine = JaxEngine(run, run.model.spec, training=False)
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), engine._state.params)
    engine._state = engine._state._replace(params=params)
    short, long = list(range(1, 21)), [n % VOCAB for n in range(7, 77)]
    alone = generate(engine, [short], 8)[0]
    assert generate(engine, [short, long], 8)[0] == alone
    with_room = JaxEngine(run, run.model.spec.model_copy(update={"capacity_factor": 0.0}), training=False)
    with_room._state = engine._state
    assert generate(with_room, [short], 8)[0] == alone


def test_a_text_of_many_calls_equals_recomputing(engine):
    assert generate(engine, [[9, 7]], 50)[0] == recomputed(engine, [9, 7], 50)


@pytest.mark.parametrize("engine", ["llama-tiny", "deepseek-tiny"], indirect=True)
def test_nothing_is_compiled_twice_and_the_cache_is_one(engine):
    warm = Sampling(0.7, top_k=9, seed=1)
    first = generate(engine, [[1, 2, 3], [9]], 20, warm)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.extend([name] if "backend_compile" in name else [])
    )
    try:
        assert generate(engine, [[1, 2, 3], [9]], 20, warm) == first
        generate(engine, [[4] * 30, [5] * 2], 7, Sampling(1, top_p=0.9, seed=8), stop=3)
        assert compiled == []
        jax.jit(lambda x: x + 17)(1)
        assert compiled  # so they would have been noticed
    finally:
        jax.monitoring.clear_event_listeners()
    generator, tokens_BP = engine._generator, np.ones((2, 64), np.int32)
    prepared, lengths_B, ended_B = generator._prepare(engine._state.params), np.full(2, 3), np.zeros(2, bool)
    _, rows = generator._prefill(prepared, tokens_BP, lengths_B, ended_B, -1, warm, 64, way_of(warm))
    generator._go_on(prepared, rows, lengths_B, 4, -1, warm, way_of(warm))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(rows.cache_L))  # written where it lay


def test_stops_at_the_stop_token_row_by_row(engine):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 30, 40]]
    free = generate(engine, prompts, 12)
    stop = free[0][3]
    stopped = generate(engine, prompts, 12, stop=stop)
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(stopped[0]) <= 3


@one_of_them
def test_seed(engine):
    hot = Sampling(temperature=1.0, seed=5)
    assert generate(engine, [[1, 2]], 12, hot) == generate(engine, [[1, 2]], 12, hot)
    assert generate(engine, [[1, 2]], 12, hot) != generate(engine, [[1, 2]], 12, hot._replace(seed=6))
    both = generate(engine, [[1, 2], [1, 2]], 12, hot)
    assert both[0] != both[1]


@one_of_them
def test_top_k_one_and_small_top_p_are_greedy(engine):
    greedy = generate(engine, [[1, 2]], 12)
    assert generate(engine, [[1, 2]], 12, Sampling(1.0, top_k=1)) == greedy
    assert generate(engine, [[1, 2]], 12, Sampling(1.0, top_p=1e-6)) == greedy
    assert generate(engine, [[1, 2]], 12, Sampling(1.0)) != greedy


@one_of_them
def test_must_fit_the_context(engine):
    assert len(generate(engine, [[1] * 60], 4)[0]) == 4
    with pytest.raises(UserError, match=r"max_tokens = 5: .*60 tokens.*context_length = 64; ask for at most 4"):
        generate(engine, [[1] * 60], 5)
    with pytest.raises(UserError, match="at least one token"):
        generate(engine, [[]], 5)


@pytest.mark.parametrize("preset", ["gpt2-tiny", "gemma2-tiny", "deepseek-tiny"])
def test_kernels_rounded_before_give_the_same_scores(preset):
    model = {"preset": preset, "vocab_size": VOCAB, "dropout": 0.0, "kv_heads": 2}
    run = make_run(run_values("x", model=model, train={"compute_dtype": "bfloat16"}))
    made = JaxEngine(run, run.model.spec, training=False)
    program, tokens_BT = made._program, np.arange(32, dtype=np.int32).reshape(2, 16)
    prepared = made._generator._prepare(made._state.params)

    def scores(model):
        cache = model.empty_cache(2, 16, program.dtype)
        return model.logits(model.decode(tokens_BT, tokens_BT % 16, cache, dtype=program.dtype)[0])

    before = jax.jit(lambda prepared: scores(prepared_model(program, prepared)))(prepared)
    at_use = jax.jit(lambda params: scores(nnx.merge(program.state.graph, params)))(made._state.params)
    np.testing.assert_array_equal(before.astype(np.float32), at_use.astype(np.float32))
    attention = prepared.params["blocks"][0]["attention"]
    assert attention["out"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("length", "room"), [(1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (192, 192), (193, 256), (700, 700)]
)
def test_lengths_are_rounded_up_to_few(length, room):
    assert bucket(length, 700) == room


def drawn(logits, sampling, count=4000):
    logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    chosen = np.asarray(sample(logits_BV, jnp.zeros(count, jnp.int32), sampling, way_of(sampling)))
    return np.bincount(chosen, minlength=len(logits)) / count


def test_sampling_follows_the_distribution():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities)
    np.testing.assert_allclose(drawn(logits, Sampling(1.0)), probabilities, atol=0.03)
    sharper = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(drawn(logits, Sampling(0.5)), sharper, atol=0.03)
    np.testing.assert_allclose(drawn(logits, Sampling(1.0, top_k=2)), [0.625, 0.375, 0, 0], atol=0.03)
    # 0.5 alone is not yet 0.7 of the whole, so the second stays; the third would begin beyond it.
    np.testing.assert_allclose(drawn(logits, Sampling(1.0, top_p=0.7)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(drawn(logits, Sampling(1.0, top_k=3, top_p=0.9)), [0.526, 0.316, 0.158, 0], atol=0.03)
