import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_values

from meshwright.config import make_run
from meshwright.engines.base import Sampling
from meshwright.engines.jax.decode import sample
from meshwright.engines.jax.engine import JaxEngine
from meshwright.errors import UserError

VOCAB, STOP = 61, 60
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=["gpt2-tiny", "minigpt-tiny", "llama-tiny", "deepseek-tiny"])
def engine(request) -> JaxEngine:
    changes = {"kv_heads": 2, "vocab_size": VOCAB, "dropout": 0.0, "tied_embeddings": False}
    run = make_run(run_values("x", model={"preset": request.param, **changes}))
    made = JaxEngine(run, run.model.spec)
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), made._state.params)
    made._state = made._state._replace(params=params)  # an untrained model says the same whatever came before
    return made


def generate(engine, prompts, count, sampling=GREEDY, stop=-1):
    rows = [[] for _ in prompts]
    for tokens in engine.generate(prompts, count, stop, sampling):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def recomputed(engine, prompt, count):
    """Greedy continuation from the whole text each time, without a cache."""
    from flax import nnx

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


def test_stops_at_the_stop_token_row_by_row(engine):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 30, 40]]
    free = generate(engine, prompts, 12)
    stop = free[0][3]
    stopped = generate(engine, prompts, 12, stop=stop)
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(stopped[0]) <= 3


def test_seed(engine):
    hot = Sampling(temperature=1.0, seed=5)
    assert generate(engine, [[1, 2]], 12, hot) == generate(engine, [[1, 2]], 12, hot)
    assert generate(engine, [[1, 2]], 12, hot) != generate(engine, [[1, 2]], 12, hot._replace(seed=6))
    both = generate(engine, [[1, 2], [1, 2]], 12, hot)
    assert both[0] != both[1]


def test_top_k_one_and_small_top_p_are_greedy(engine):
    greedy = generate(engine, [[1, 2]], 12)
    assert generate(engine, [[1, 2]], 12, Sampling(1.0, top_k=1)) == greedy
    assert generate(engine, [[1, 2]], 12, Sampling(1.0, top_p=1e-6)) == greedy
    assert generate(engine, [[1, 2]], 12, Sampling(1.0)) != greedy


def test_must_fit_the_context(engine):
    assert len(generate(engine, [[1] * 60], 4)[0]) == 4
    with pytest.raises(UserError, match=r"max_tokens = 5: .*60 tokens.*context_length = 64; ask for at most 4"):
        generate(engine, [[1] * 60], 5)
    with pytest.raises(UserError, match="at least one token"):
        generate(engine, [[]], 5)


def drawn(logits, sampling, count=4000):
    logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    chosen = np.asarray(sample(logits_BV, jnp.zeros(count, jnp.int32), sampling))
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
