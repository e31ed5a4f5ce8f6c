"""Functions whose gradient is written by hand, where the one that autodiff makes is slow.

The formulas are the exact ones. What is gained: less is kept from forward to backward, and on a CPU a product over
tokens gets its operands in the order in which XLA is fast.

Shapes: I and O widths of input and output, D width, B batch, H heads, K key-value heads, G = H / K, T queries in time,
S keys in time, C head width, E width of a head's values, R = G T.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _settled(x: jax.Array) -> jax.Array:
    # On a CPU, a transpose that XLA folds into a product, or a sum that it folds into a transpose, is slow.
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def over_tokens(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over all leading axes of the outer products of `a`, `[..., I]`, and `b`, `[..., O]`; float32 `[I, O]`.

    The smaller of the two is transposed. Leading axes are not merged: they may lie cut along different mesh axes.
    """
    if a.shape[-1] > b.shape[-1]:
        return _settled(over_tokens(b, a)).T
    tokens = a.ndim - 1
    a_first = _settled(jnp.moveaxis(a, -1, 0))
    contracted = (tuple(range(1, tokens + 1)), tuple(range(tokens)))
    return jax.lax.dot_general(a_first, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def linear(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """`x @ kernel` for `x` of shape `[..., I]`, computed in the type of `x`."""
    return x @ kernel_IO.astype(x.dtype)


def _linear_forward(x, kernel_IO):
    return linear(x, kernel_IO), (x, kernel_IO)


def _linear_backward(kept, dy):
    x, kernel_IO = kept
    dy = _settled(dy)
    return dy @ kernel_IO.T.astype(dy.dtype), over_tokens(_settled(x), dy).astype(kernel_IO.dtype)


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The tanh form of GELU (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1.0 + jnp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x)))


def _gelu_backward(x, dy):
    tanh = jnp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x))
    inner = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * x * x)
    return (dy * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: jax.Array) -> jax.Array:
    """Layer normalisation over the last axis, in float32."""
    return _layer_norm_forward(x, scale_D, bias_D, eps)[0]


def _layer_norm_forward(x, scale_D, bias_D, eps):
    exact = x.astype(jnp.float32)
    mean = exact.mean(axis=-1, keepdims=True)
    centred = exact - mean
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale_D + bias_D).astype(x.dtype), (x, mean, inverse, scale_D)


def _layer_norm_backward(kept, dy):
    x, mean, inverse, scale_D = kept
    normed, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    dn = dy * scale_D
    dx = inverse * (dn - dn.mean(axis=-1, keepdims=True) - normed * (dn * normed).mean(axis=-1, keepdims=True))
    leading = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), (dy * normed).sum(axis=leading), dy.sum(axis=leading), None


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def rms_norm(x: jax.Array, scale_D: jax.Array, eps: jax.Array) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in float32."""
    return _rms_norm_forward(x, scale_D, eps)[0]


def _rms_norm_forward(x, scale_D, eps):
    exact = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(exact).mean(axis=-1, keepdims=True) + eps)
    return (exact * inverse * scale_D).astype(x.dtype), (x, inverse, scale_D)


def _rms_norm_backward(kept, dy):
    x, inverse, scale_D = kept
    normed, dy = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    dn = dy * scale_D
    dx = inverse * (dn - normed * (dn * normed).mean(axis=-1, keepdims=True))
    return dx.astype(x.dtype), (dy * normed).sum(axis=tuple(range(x.ndim - 1))), None


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class Scoring(NamedTuple):
    """How the product of a query and a key becomes a score."""

    scale: float
    """What it is multiplied by."""
    softcap: float = 0.0
    """Bound c of the scores, as c tanh(score / c) (Gemma 2, 2024); 0: none."""


def capped(scores: jax.Array, softcap: float) -> tuple[jax.Array, jax.Array | None]:
    """Scores within a bound, and the slope there.

    Arguments:
        scores: float32, of any shape.
        softcap: the bound; 0: there is none, and no slope is returned.
    """
    if not softcap:
        return scores, None
    tanh = jnp.tanh(scores / softcap)
    return softcap * tanh, 1.0 - jnp.square(tanh)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def causal_attention(
    q_BHTC: jax.Array,
    k_BKTC: jax.Array,
    v_BKTE: jax.Array,
    segments_BT: jax.Array | None = None,
    window: jax.Array | None = None,
    scoring: Scoring | None = None,
) -> jax.Array:
    """Softmax attention to this and earlier positions; head `h` uses key-value head `h // G`.

    Scores and softmax are in float32.

    Arguments:
        q_BHTC, k_BKTC, v_BKTE: queries, keys and values.
        segments_BT: of a row with segments, a position sees those of its own one alone.
        window: how many positions one sees, itself included, `[]`; None: all before it.
        scoring: None: the usual scale, one over the root of C, and no bound.

    Returns:
        `[B, H, T, E]`, of the type of `v_BKTE`.
    """
    return _attention_forward(q_BHTC, k_BKTC, v_BKTE, segments_BT, window, scoring)[0]


def _attention_forward(q_BHTC, k_BKTC, v_BKTE, segments_BT=None, window=None, scoring=None):
    batch, heads, time, width = q_BHTC.shape
    scoring = scoring or Scoring(width**-0.5)
    kv_heads = k_BKTC.shape[1]
    rows = heads // kv_heads * time  # the queries of a group, one head after another
    q_BKRC = (q_BHTC * scoring.scale).reshape(batch, kv_heads, rows, width)
    scores_BKRS, slope_BKRS = capped(_product(q_BKRC, k_BKTC, 3, 3).astype(jnp.float32), scoring.softcap)
    seen_B1TS = jnp.tril(jnp.ones((time, time), bool))[None, None]
    if window is not None:
        seen_B1TS = seen_B1TS & (jnp.arange(time)[:, None] - jnp.arange(time) < window)
    if segments_BT is not None:
        seen_B1TS = seen_B1TS & (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    seen_B1RS = jnp.tile(seen_B1TS, (1, 1, heads // kv_heads, 1))
    scores_BKRS = jnp.where(seen_B1RS, scores_BKRS, jnp.finfo(jnp.float32).min)
    exp_BKRS = jnp.exp(scores_BKRS - scores_BKRS.max(axis=-1, keepdims=True))
    weights_BKRS = (exp_BKRS / exp_BKRS.sum(axis=-1, keepdims=True)).astype(v_BKTE.dtype)
    y_BKRE = _product(weights_BKRS, v_BKTE, 3, 2).astype(v_BKTE.dtype)
    kept = (q_BKRC, k_BKTC, v_BKTE, weights_BKRS, y_BKRE, slope_BKRS)
    return y_BKRE.reshape(batch, heads, time, -1), kept


def _attention_backward(scoring, kept, dy_BHTE):
    q_BKRC, k_BKTC, v_BKTE, weights_BKRS, y_BKRE, slope_BKRS = kept
    scoring, dtype = scoring or Scoring(q_BKRC.shape[-1] ** -0.5), v_BKTE.dtype
    dy_BKRE = _settled(dy_BHTE.reshape(y_BKRE.shape))
    dv_BKTE = _settled(_product(_turned(dy_BKRE), weights_BKRS, 3, 2))
    along_BKR1 = (dy_BKRE.astype(jnp.float32) * y_BKRE.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    d_weights_BKRS = _product(dy_BKRE, v_BKTE, 3, 3).astype(jnp.float32)
    d_scores_BKRS = weights_BKRS.astype(jnp.float32) * (d_weights_BKRS - along_BKR1)
    d_scores_BKRS = (d_scores_BKRS if slope_BKRS is None else d_scores_BKRS * slope_BKRS).astype(dtype)
    dk_BKTC = _settled(_product(_turned(q_BKRC), d_scores_BKRS, 3, 2))
    dq_BKRC = _product(d_scores_BKRS, k_BKTC, 3, 2) * scoring.scale
    return (
        dq_BKRC.astype(dtype).reshape(*dy_BHTE.shape[:3], -1),
        jnp.swapaxes(dk_BKTC, 2, 3).astype(dtype),
        jnp.swapaxes(dv_BKTE, 2, 3).astype(dtype),
        None,
        None,
    )


causal_attention.defvjp(_attention_forward, _attention_backward)


def _turned(x_BKRC: jax.Array) -> jax.Array:
    return _settled(jnp.swapaxes(x_BKRC, 2, 3))


def _product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    contracted = ((contract_a,), (contract_b,))
    return jax.lax.dot_general(a, b, (contracted, ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
