import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.engines.jax.loss import Head, cross_entropy_sum, sharded_cross_entropy_sum


def case(count=24, width=8, vocab=11, bias=True):
    random = np.random.default_rng(0)
    x = random.standard_normal((count, width)).astype(np.float32)
    kernel = 3 * random.standard_normal((width, vocab)).astype(np.float32)
    head = Head(jnp.asarray(kernel), jnp.asarray(random.standard_normal(vocab), jnp.float32) if bias else None)
    return jnp.asarray(x), head, random.integers(0, vocab, count), random.integers(0, 2, count).astype(np.float32)


def loss_of(x, head, targets, weights, chunk):
    return cross_entropy_sum(x, head, targets, weights, chunk=chunk, vocab=head.kernel_DV.shape[1])


def naive(x, head, targets, weights):
    scores = x @ head.kernel_DV + (0.0 if head.bias_V is None else head.bias_V)
    losses = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
    return (losses * weights).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 8, 1000])
def test_loss_and_gradients_equal_the_naive_ones(chunk, bias):
    x, head, targets, weights = case(bias=bias)

    def chunked(x, head):
        return loss_of(x, head, targets, weights, chunk)

    total, gradients = jax.value_and_grad(chunked, argnums=(0, 1))(x, head)
    expected, expected_gradients = jax.value_and_grad(naive, argnums=(0, 1))(x, head, targets, weights)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(chunked(x, head)) == pytest.approx(float(expected), rel=1e-6)  # without a gradient: another path
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.abs(want).max() > 0.1


@pytest.mark.parametrize("vocab", [11, 9])
def test_bounded_scores_have_the_naive_loss_and_gradients(vocab):
    x, head, targets, weights = case(vocab=11)
    targets = targets % vocab

    def bounded(x, head):
        scores = 1.5 * jnp.tanh((x @ head.kernel_DV + head.bias_V) / 1.5)[:, :vocab]
        return (weights * (jax.nn.logsumexp(scores, axis=-1) - scores[jnp.arange(len(targets)), targets])).sum()

    def chunked(x, head):
        return cross_entropy_sum(x, head, targets, weights, chunk=5, vocab=vocab, softcap=1.5)

    total, gradients = jax.value_and_grad(chunked, argnums=(0, 1))(x, head)
    expected, expected_gradients = jax.value_and_grad(bounded, argnums=(0, 1))(x, head)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(chunked(x, head)) == pytest.approx(float(expected), rel=1e-6)
    assert abs(float(expected) - float(loss_of(x, head, targets, weights, 5))) > 1
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.abs(want).max() > 0.1


def test_backward_scales():
    x, head, targets, weights = case()

    def scaled(x, by):
        return by * loss_of(x, head, targets, weights, 8)

    once, thrice = (jax.grad(scaled)(x, by) for by in (1.0, 3.0))
    np.testing.assert_allclose(thrice, 3 * once, rtol=1e-6)


def test_weights_of_zero_count_for_nothing():
    x, head, targets, weights = case()
    got = cross_entropy_sum(x, head, targets, weights, chunk=8, vocab=11)
    kept = weights > 0
    assert 0 < kept.sum() < len(kept)
    alone = cross_entropy_sum(x[kept], head, targets[kept], weights[kept], chunk=8, vocab=11)
    assert float(got) == pytest.approx(float(alone), rel=1e-6)


def test_chunks_are_really_chunks():
    x, head, targets, weights = case()
    program = str(jax.make_jaxpr(lambda x: loss_of(x, head, targets, weights, 8))(x))
    assert "f32[8,11]" in program
    assert "f32[24,11]" not in program


def test_large_scores_overflow_nothing():
    x, head, targets, weights = case()
    total, gradient = jax.value_and_grad(lambda x: loss_of(x, head, targets, weights, 8))(1e4 * x)
    assert np.isfinite(float(total))
    assert np.isfinite(np.asarray(gradient)).all()


def test_bfloat16_is_near_float32():
    x, head, targets, weights = case(count=64, width=32)

    def gradient(x):
        return jax.grad(lambda x: loss_of(x, head, targets[:64], weights[:64], 16))(x)

    exact, rough = gradient(x), gradient(x.astype(jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(rough, np.float32) - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05


def test_padding_of_the_vocabulary_is_given_nothing():
    x, head, targets, weights = case()
    head = jax.tree.map(lambda leaf: 0.1 * leaf, head)
    padded = Head(jnp.pad(head.kernel_DV, ((0, 0), (0, 5))), jnp.pad(head.bias_V, (0, 5)))

    def loss(x, head, vocab):
        return cross_entropy_sum(x, head, targets, weights, chunk=8, vocab=vocab)

    total, (dx, d_head) = jax.value_and_grad(loss, argnums=(0, 1))(x, head, 11)
    same, (dx_padded, d_padded) = jax.value_and_grad(loss, argnums=(0, 1))(x, padded, 11)
    assert float(same) == pytest.approx(float(total), rel=1e-6)
    np.testing.assert_allclose(dx_padded, dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_padded.kernel_DV[:, :11], d_head.kernel_DV, rtol=1e-5, atol=1e-6)
    assert not np.asarray(d_padded.kernel_DV[:, 11:]).any()
    assert not np.asarray(d_padded.bias_V[11:]).any()
    assert float(loss(x, padded, 16)) > 1.001 * float(total)  # were it not known to be padding


@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (2, 3)])
def test_shares_change_nothing(shares):
    x, head, targets, weights = case(count=2 * 4 * 6)
    x_AMTD, by_row = x.reshape(2, 4, 6, -1), [jnp.asarray(part.reshape(2, 4, 6)) for part in (targets, weights)]

    def cut(x, head):
        return sharded_cross_entropy_sum(x, head, *by_row, chunk=5, vocab=11, shares=shares)

    total, (dx, d_head) = jax.value_and_grad(cut, argnums=(0, 1))(x_AMTD, head)
    expected, (want_x, want_head) = jax.value_and_grad(naive, argnums=(0, 1))(x, head, targets, weights)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(dx.reshape(x.shape), want_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_head.kernel_DV, want_head.kernel_DV, rtol=1e-5, atol=1e-5)
    chunks = str(jax.make_jaxpr(cut)(x_AMTD, head))
    assert f"length={-(-48 // (shares[0] * shares[1]) // 5)}" in chunks
