import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.engines.jax.loss import Head, cross_entropy_sum


def case(count=24, width=8, vocab=11, bias=True):
    random = np.random.default_rng(0)
    x = random.standard_normal((count, width)).astype(np.float32)
    kernel = 3 * random.standard_normal((width, vocab)).astype(np.float32)
    head = Head(jnp.asarray(kernel), jnp.asarray(random.standard_normal(vocab), jnp.float32) if bias else None)
    return jnp.asarray(x), head, random.integers(0, vocab, count), random.integers(0, 2, count).astype(np.float32)


def naive(x, head, targets, weights):
    scores = x @ head.kernel_DV + (0.0 if head.bias_V is None else head.bias_V)
    losses = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
    return (losses * weights).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 8, 1000])
def test_loss_and_gradients_equal_the_naive_ones(chunk, bias):
    x, head, targets, weights = case(bias=bias)

    def chunked(x, head):
        return cross_entropy_sum(x, head, targets, weights, chunk).total

    total, gradients = jax.value_and_grad(chunked, argnums=(0, 1))(x, head)
    expected, expected_gradients = jax.value_and_grad(naive, argnums=(0, 1))(x, head, targets, weights)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(chunked(x, head)) == pytest.approx(float(expected), rel=1e-6)  # without a gradient: another path
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.abs(want).max() > 0.1


def test_backward_scales():
    x, head, targets, weights = case()

    def scaled(x, by):
        return by * cross_entropy_sum(x, head, targets, weights, 8).total

    once, thrice = (jax.grad(scaled)(x, by) for by in (1.0, 3.0))
    np.testing.assert_allclose(thrice, 3 * once, rtol=1e-6)


def test_weights_of_zero_count_for_nothing():
    x, head, targets, weights = case()
    got = cross_entropy_sum(x, head, targets, weights, 8)
    kept = weights > 0
    assert 0 < kept.sum() < len(kept)
    assert float(got.tokens) == kept.sum()
    alone = cross_entropy_sum(x[kept], head, targets[kept], weights[kept], 8)
    assert float(got.total) == pytest.approx(float(alone.total), rel=1e-6)


def test_chunks_are_really_chunks():
    x, head, targets, weights = case()
    program = str(jax.make_jaxpr(lambda x: cross_entropy_sum(x, head, targets, weights, 8).total)(x))
    assert "f32[8,11]" in program
    assert "f32[24,11]" not in program


def test_large_scores_overflow_nothing():
    x, head, targets, weights = case()
    total, gradient = jax.value_and_grad(lambda x: cross_entropy_sum(x, head, targets, weights, 8).total)(1e4 * x)
    assert np.isfinite(float(total))
    assert np.isfinite(np.asarray(gradient)).all()


def test_bfloat16_is_near_float32():
    x, head, targets, weights = case(count=64, width=32)

    def gradient(x):
        return jax.grad(lambda x: cross_entropy_sum(x, head, targets[:64], weights[:64], 16).total)(x)

    exact, rough = gradient(x), gradient(x.astype(jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(rough, np.float32) - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05
