"""The kernels for GPUs, interpreted on the CPU, against autodiff of the formulas they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.engines.jax.loss import Head, cross_entropy_sum
from meshwright.models import kernels
from meshwright.models.decoder import Decoder
from meshwright.models.spec import preset


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_norm(x, scale, bias, centred):
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def assert_near(got, wanted, tolerance=1e-5):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(64, 96), (64, 600), (6, 100), (5, 2500), (16, 2500), (5, 5000)])
def test_the_gradient_of_a_norm(rows, width, centred):
    x, dy, beside = (random(rows, width, seed=seed) for seed in range(3))
    x, scale = 3 * x + 1, random(width, seed=3)
    got = kernels.norm_backward(x, dy, scale, 1e-5, centred=centred, beside=beside)
    _, back = jax.vjp(lambda *of: plain_norm(*of, centred), x, scale, jnp.zeros(width))
    dx, d_scale, d_bias = back(dy)
    for part, wanted in zip(got, (dx + beside, d_scale, d_bias), strict=True):
        assert_near(part, wanted)


def test_the_gradient_of_gelu_and_its_bias():
    x, dy, bias = 2 * random(2, 20, 1500), random(2, 20, 1500, seed=1), random(1500, seed=2)
    _, back = jax.vjp(lambda x, bias: jax.nn.gelu(x + bias, approximate=True), x, bias)
    for part, wanted in zip(kernels.gelu_backward(x, bias, dy), back(dy), strict=True):
        assert_near(part, wanted)
    assert_near(kernels.gelu(x, bias), jax.nn.gelu(x + bias, approximate=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(("width", "vocab"), [(5000, 4999), (700, 650), (4096, 4096)])
def test_cross_entropies_and_their_gradients(width, vocab, dtype):
    random_numbers = np.random.default_rng(0)
    given = (5 * random(7, width)).astype(dtype)
    scores, targets = given.astype(jnp.float32), jnp.asarray(random_numbers.integers(0, vocab, 7))
    weights = jnp.asarray([1.0, 0.0, 1.0, 2.0, 1.0, 0.0, 1.0])

    def plain(scores):
        seen = jnp.where(jnp.arange(width) < vocab, scores, -jnp.inf)
        each = jax.nn.logsumexp(seen, axis=-1) - jnp.take_along_axis(seen, targets[:, None], axis=1)[:, 0]
        return (each * weights).sum(), each

    wanted, each = jax.grad(plain, has_aux=True)(scores)
    losses, d_scores = kernels.cross_entropy(given, targets, weights, vocab=vocab, dtype=jnp.float32)
    assert_near(losses, each)
    assert_near(d_scores, wanted)
    assert not np.asarray(d_scores[:, vocab:]).any()
    without_target = targets.at[1].set(-100)  # its weight is 0
    of_first, _ = kernels.cross_entropy(given, targets.at[1].set(0), weights, vocab=vocab, dtype=jnp.float32)
    losses, same = kernels.cross_entropy(given, without_target, weights, vocab=vocab, dtype=jnp.float32)
    np.testing.assert_array_equal(same, d_scores)
    np.testing.assert_array_equal(losses, of_first)


def test_a_score_beyond_half_precision_is_told_by_the_loss():
    scores = random(3, 300).at[1, 7].set(1e5).astype(jnp.float16)
    losses, _ = kernels.cross_entropy(scores, jnp.zeros(3, jnp.int32), jnp.ones(3), vocab=300, dtype=jnp.bfloat16)
    assert np.isfinite(losses).tolist() == [True, False, True]


def loss_and_gradient(family):
    spec = preset(family).model_copy(update={"layers": 2, "vocab_size": 300})
    graph, params = nnx.split(Decoder(spec, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 17)))

    def loss(params):
        model = nnx.merge(graph, params)
        x_ND = model.hidden(tokens[:, :-1])[0].reshape(-1, spec.width)
        head, targets = Head(*model.head_weights()), tokens[:, 1:].reshape(-1)
        return cross_entropy_sum(x_ND, head, targets, jnp.ones(len(x_ND)), chunk=16, vocab=300)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("family", ["gpt2-tiny", "llama-tiny"])
def test_a_model_with_kernels_has_the_same_loss_and_gradient(family, monkeypatch):
    expected, expected_gradient = loss_and_gradient(family)
    called, call = [], kernels.call
    monkeypatch.setattr(kernels, "applies", lambda x: True)
    monkeypatch.setattr(
        kernels, "call", lambda kernel, *rest, **more: called.append(kernel) or call(kernel, *rest, **more)
    )
    loss, gradient = loss_and_gradient(family)
    used = {kernel.func.__name__ for kernel in called}
    assert used == {"_norm_backward", "_cross_entropy"} | (
        {"_gelu", "_gelu_backward"} if family == "gpt2-tiny" else set()
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("common", [0.0, -35.0, -110.0])  # GPT-2's scores lie about the last
def test_scores_in_half_precision_are_no_further_from_float32_than_bfloat16_factors_are(monkeypatch, common):
    x, kernel = 1 + random(256, 256), random(256, 1000, seed=1) / 4 + common / 256
    targets = jnp.asarray(np.random.default_rng(0).integers(0, 1000, 256))

    def gradients_of(dtype):
        def loss(x, kernel):
            head, ones = Head(kernel, None), jnp.ones(256)
            return cross_entropy_sum(x.astype(dtype), head, targets, ones, chunk=64, vocab=1000)

        value, parts = jax.value_and_grad(loss, (0, 1))(x, kernel)
        return float(value), jnp.concatenate([part.ravel() for part in parts])

    exact, exact_gradient = gradients_of(jnp.float32)
    plain, plain_gradient = gradients_of(jnp.bfloat16)
    monkeypatch.setattr(kernels, "applies", lambda x: True)
    by_kernel, by_kernel_gradient = gradients_of(jnp.bfloat16)
    assert by_kernel != plain  # they do differ
    assert by_kernel == pytest.approx(exact, rel=5e-5) and plain == pytest.approx(exact, rel=5e-5)
    off, plain_off = (jnp.linalg.norm(one - exact_gradient) for one in (by_kernel_gradient, plain_gradient))
    assert off <= 1.1 * plain_off


def test_they_are_left_out_on_a_cpu():
    assert not kernels.applies(random(4, 8))


@pytest.mark.parametrize("width", [96, 2500])
def test_triton_takes_them(monkeypatch, width):
    # The interpreter takes more than Triton does; lowering for a GPU needs none.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, scale = random(64, width).astype(jnp.bfloat16), random(width)
    targets = jnp.zeros(64, jnp.int32)

    def all_of_them(x):
        return (
            kernels.norm_backward(x, x, scale, 1e-5, centred=True, beside=x),
            kernels.gelu(x, scale),
            kernels.gelu_backward(x, scale, x),
            kernels.cross_entropy(x.astype(jnp.float16), targets, scale[:64], vocab=width - 3, dtype=x.dtype),
        )

    text = jax.jit(all_of_them).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 4
