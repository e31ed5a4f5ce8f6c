"""The kernels for GPUs, interpreted on the CPU, against autodiff of the formulas they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.engines.jax.loss import Head, cross_entropy_sum
from meshwright.models import gradients, kernels
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
@pytest.mark.parametrize(("rows", "width"), [(64, 96), (6, 100), (5, 2500)])
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
    assert_near(gradients.gelu_of_sum(x, bias), jax.nn.gelu(x + bias, approximate=True))


@pytest.mark.parametrize(("width", "vocab"), [(5000, 4999), (700, 650), (4096, 4096)])
def test_cross_entropies_and_their_gradients(width, vocab):
    random_numbers = np.random.default_rng(0)
    scores, targets = 5 * random(7, width), jnp.asarray(random_numbers.integers(0, vocab, 7))
    weights = jnp.asarray([1.0, 0.0, 1.0, 2.0, 1.0, 0.0, 1.0])

    def plain(scores):
        seen = jnp.where(jnp.arange(width) < vocab, scores, -jnp.inf)
        each = jax.nn.logsumexp(seen, axis=-1) - jnp.take_along_axis(seen, targets[:, None], axis=1)[:, 0]
        return (each * weights).sum(), each

    wanted, each = jax.grad(plain, has_aux=True)(scores)
    losses, d_scores = kernels.cross_entropy(scores, targets, weights, vocab=vocab, dtype=jnp.float32)
    assert_near(losses, each)
    assert_near(d_scores, wanted)
    assert not np.asarray(d_scores[:, vocab:]).any()


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
    assert used == {"_norm_backward", "_cross_entropy"} | ({"_gelu_backward"} if family == "gpt2-tiny" else set())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


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
            kernels.gelu_backward(x, scale, x),
            kernels.cross_entropy(x.astype(jnp.float32), targets, scale[:64], vocab=width - 3, dtype=x.dtype),
        )

    text = jax.jit(all_of_them).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 3
