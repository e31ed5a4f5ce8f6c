"""Each hand-written gradient against the one that autodiff makes of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import gradients
from meshwright.models.attention import attend, causal_mask, whole_attention
from meshwright.models.gradients import Scoring


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_layer_norm(x, scale, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + eps) * scale + bias


def plain_rms_norm(x, scale, eps):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * scale


def plain_attention(q, k, v):
    return plain_whole_attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def plain_whole_attention(q, k, v, window=None, scoring=None):
    return attend(q, k, v, causal_mask(jnp.arange(q.shape[1]), None, window), scoring=scoring)


CASES = {
    "linear, wide in": (gradients.linear, lambda x, w: x @ w, (random(6, 9), random(9, 4, seed=1))),
    "linear, wide out": (gradients.linear, lambda x, w: x @ w, (random(6, 4), random(4, 9, seed=1))),
    "bias": (gradients.add_bias, lambda y, b: y + b, (random(2, 5, 4), random(4, seed=1))),
    "gelu": (gradients.gelu, lambda x: jax.nn.gelu(x, approximate=True), (3 * random(5, 7),)),
    "layer norm": (
        lambda x, scale, bias: gradients.norm(x, scale, bias, gradients.Norm(True, 1e-2)),
        lambda x, scale, bias: plain_layer_norm(x, scale, bias, 1e-2),
        (random(2, 5, 7) + 1, random(7, seed=1), random(7, seed=2)),
    ),
    "layer norm beside a residual": (
        lambda x, scale, bias: sum(gradients.norm_beside(x, scale, bias, gradients.Norm(True, 1e-2))),
        lambda x, scale, bias: plain_layer_norm(x, scale, bias, 1e-2) + x,
        (random(2, 5, 7) + 1, random(7, seed=1), random(7, seed=2)),
    ),
    "rms norm": (
        lambda x, scale: gradients.norm(x, scale, None, gradients.Norm(False, 1e-2)),
        lambda x, scale: plain_rms_norm(x, scale, 1e-2),
        (random(2, 5, 7) + 1, random(7, seed=1)),
    ),
    "attention": (
        gradients.causal_attention,
        plain_attention,
        (random(2, 4, 6, 8), random(2, 4, 6, 8, seed=1), random(2, 4, 6, 8, seed=2)),
    ),
    "grouped attention": (
        gradients.causal_attention,
        plain_attention,
        (random(2, 6, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 2, 5, 8, seed=2)),
    ),
    "attention, narrow values": (
        gradients.causal_attention,
        plain_attention,
        (random(2, 4, 6, 8), random(2, 4, 6, 8, seed=1), random(2, 4, 6, 3, seed=2)),
    ),
    "grouped attention, wide values": (
        gradients.causal_attention,
        plain_attention,
        (random(2, 6, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 2, 5, 13, seed=2)),
    ),
    "attention, window": (
        lambda q, k, v: whole_attention(q, k, v, None, jnp.int32(3)),
        lambda q, k, v: plain_whole_attention(q, k, v, 3),
        (random(2, 6, 4, 8), random(2, 6, 2, 8, seed=1), random(2, 6, 2, 8, seed=2)),
    ),
    "attention, bound and scale": (
        lambda q, k, v: whole_attention(q, k, v, None, None, Scoring(0.9, 1.5)),
        lambda q, k, v: plain_whole_attention(q, k, v, None, Scoring(0.9, 1.5)),
        (random(2, 6, 4, 8), random(2, 6, 2, 8, seed=1), random(2, 6, 2, 8, seed=2)),
    ),
    "whole attention, narrow values": (
        lambda q, k, v: whole_attention(q, k, v, None),
        plain_whole_attention,
        (random(2, 5, 6, 8), random(2, 5, 2, 8, seed=1), random(2, 5, 2, 3, seed=2)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_autodiff(name):
    fast, plain, arguments = CASES[name]
    out, pull = jax.vjp(fast, *arguments)
    expected, pull_expected = jax.vjp(plain, *arguments)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    upstream = random(*out.shape, seed=3)
    for got, want in zip(pull(upstream), pull_expected(upstream), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert np.abs(want).max() > 0.1
    assert "custom_vjp_call" in str(jax.make_jaxpr(fast)(*arguments))
    assert "custom_vjp_call" not in str(jax.make_jaxpr(plain)(*arguments))


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_in_bfloat16_out(name):
    fast, plain, arguments = CASES[name]
    activations = 3 if "attention" in name else 1
    rough = [x.astype(jnp.bfloat16) for x in arguments[:activations]] + list(arguments[activations:])
    out, pull = jax.vjp(fast, *rough)
    assert out.dtype == jnp.bfloat16
    expected, pull_expected = jax.vjp(plain, *arguments)
    upstream = random(*out.shape, seed=3)
    pairs = [(out, expected), *zip(pull(upstream.astype(jnp.bfloat16)), pull_expected(upstream), strict=True)]
    for argument, (got, want) in zip([None, *rough], pairs, strict=True):
        assert argument is None or got.dtype == argument.dtype
        error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
        assert 0 < error < 0.02


def test_a_bound_and_a_window_are_what_they_say():
    q, k, v = random(1, 5, 1, 4), random(1, 5, 1, 4, seed=1), random(1, 5, 1, 4, seed=2)
    got = np.asarray(whole_attention(q, k, v, None, jnp.int32(2), Scoring(0.7, 1.1)))
    for t in range(5):
        seen = [s for s in (t - 1, t) if s >= 0]
        weights = np.exp([1.1 * np.tanh(0.7 * np.dot(q[0, t, 0], k[0, s, 0]) / 1.1) for s in seen])
        expected = sum(w * np.asarray(v[0, s, 0]) for w, s in zip(weights / weights.sum(), seen, strict=True))
        np.testing.assert_allclose(got[0, t, 0], expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    y, bias = jnp.zeros((4, 512, 3), jnp.bfloat16), jnp.zeros(3)
    dy = random(4, 512, 3, seed=3).astype(jnp.bfloat16)
    exact = np.asarray(dy, np.float64).sum((0, 1))
    found = jax.vjp(gradients.add_bias, y, bias)[1](dy)[1]
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    rounded = jax.vjp(lambda y, bias: y + bias.astype(y.dtype), y, bias)[1](dy)[1]
    assert np.abs(np.asarray(rounded, np.float64) - exact).max() > 1e-3 * np.abs(exact).max()
