"""Functions whose gradient is written by hand, where the one that autodiff makes is slow.

The formulas are the exact ones. What is gained: less is kept from forward to backward, and on a CPU a product over
tokens gets its operands in the order in which XLA is fast.

Shapes: I and O widths of input and output, D width, B batch, H heads, K key-value heads, G = H / K, T queries in time,
S keys in time, C head width, E width of a head's values, R = G T.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models import kernels
from meshwright.models.kernels import GELU_CUBIC, GELU_SCALE
from meshwright.models.layout import layout


def settled(x: jax.Array) -> jax.Array:
    """`x`, made by itself on a CPU, where a transpose that XLA folds into a product, or a sum that it folds into a
    transpose, is slow."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def over_tokens(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over all leading axes of the outer products of `a`, `[..., I]`, and `b`, `[..., O]`; float32 `[I, O]`.

    The smaller of the two is transposed. Leading axes are not merged: they may lie cut along different mesh axes.
    """
    if a.shape[-1] > b.shape[-1]:
        return settled(over_tokens(b, a)).T
    tokens = a.ndim - 1
    a_first = settled(jnp.moveaxis(a, -1, 0))
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
    dy = settled(dy)
    return dy @ kernel_IO.T.astype(dy.dtype), over_tokens(settled(x), dy).astype(kernel_IO.dtype)


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def add_bias(y: jax.Array, bias_O: jax.Array) -> jax.Array:
    """`y + bias`, in the type of `y`; the gradient of the bias is summed over tokens in float32, whatever that is."""
    return y + bias_O.astype(y.dtype)


def _add_bias_backward(bias_O, dy):
    return dy, dy.sum(axis=tuple(range(dy.ndim - 1)), dtype=jnp.float32).astype(bias_O.dtype)


add_bias.defvjp(lambda y, bias_O: (add_bias(y, bias_O), bias_O), _add_bias_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The tanh form of GELU (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1.0 + jnp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x)))


def _gelu_backward(x, dy):
    tanh = jnp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))
    inner = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return (dy * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def gelu_of_sum(x: jax.Array, bias_F: jax.Array) -> jax.Array:
    """`gelu(x + bias)`, of which the sum isn't kept; to be used where `kernels.applies`."""
    return kernels.gelu(x, bias_F)


def _gelu_of_sum_backward(kept, dy):
    x, bias_F = kept
    dx, d_bias_F = kernels.gelu_backward(x, bias_F, dy)
    return dx, d_bias_F.astype(bias_F.dtype)


gelu_of_sum.defvjp(lambda x, bias_F: (gelu_of_sum(x, bias_F), (x, bias_F)), _gelu_of_sum_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table_VD: jax.Array, tokens: jax.Array, dtype: Any, back: Any) -> jax.Array:
    """The rows `tokens` of a table.

    Arguments:
        table_VD: float32.
        tokens: `[..., B, T]`.
        dtype: of the result.
        back: a type that holds its gradient exactly.
    """
    beside = (None,) * (tokens.ndim - 2)
    # Where the table is cut by its width, rows are: each device looks up its part of all, and then they swap.
    x = table_VD[layout().place(tokens, *beside, "batch_beside_width", "time")]
    x = layout().place(x.astype(dtype), *beside, "batch_beside_width", "time", "width")
    return layout().place(x, *beside, "batch", "time", None)


def _look_up_forward(table_VD, tokens, dtype, back):
    return look_up(table_VD, tokens, dtype, back), (table_VD, tokens)


def _look_up_backward(dtype, back, kept, dx):
    table_VD, tokens = kept  # just the shape of the former
    beside = (None,) * (tokens.ndim - 2)
    dx = layout().place(dx.astype(back), *beside, "batch_beside_width", "time", "width")
    tokens = layout().place(tokens, *beside, "batch_beside_width", "time")
    dx, tokens = layout().gather_rows(dx, tokens, table_VD.shape[0])
    return jnp.zeros_like(table_VD).at[tokens].add(dx.astype(table_VD.dtype)), None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Norm(NamedTuple):
    """A norm over the last axis, in float32."""

    centred: bool
    """Whether the mean is taken off first: LayerNorm (Ba et al., 2016); without, RMSNorm (Zhang and Sennrich, 2019)."""
    eps: float
    """Added to the mean square."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, how: Norm) -> jax.Array:
    """`x` normed, times the scale, plus the bias where there is one."""
    return _norm_forward(x, scale_D, bias_D, how)[0]


def _norm_forward(x, scale_D, bias_D, how):
    exact = x.astype(jnp.float32)
    mean = exact.mean(axis=-1, keepdims=True) if how.centred else None
    centred = exact if mean is None else exact - mean
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + how.eps)
    y = centred * inverse * scale_D
    y = (y if bias_D is None else y + bias_D).astype(x.dtype)
    # The kernel of the backward pass reads x anyway, and finds these from it.
    return y, (x, *((None, None) if kernels.applies(x) else (mean, inverse)), scale_D, bias_D)


def _norm_backward(how, kept, dy, beside=None):
    x, mean, inverse, scale_D, bias_D = kept
    if inverse is None:
        dx, d_scale_D, d_bias_D = kernels.norm_backward(x, dy, scale_D, how.eps, centred=how.centred, beside=beside)
        return dx, d_scale_D, None if bias_D is None else d_bias_D
    exact, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    normed = (exact if mean is None else exact - mean) * inverse
    dn = dy * scale_D
    along = normed * (dn * normed).mean(axis=-1, keepdims=True)
    dx = inverse * (dn - (0.0 if mean is None else dn.mean(axis=-1, keepdims=True)) - along)
    dx = dx if beside is None else dx + beside.astype(jnp.float32)
    leading = tuple(range(x.ndim - 1))
    d_scale_D, d_bias_D = (dy * normed).sum(axis=leading), dy.sum(axis=leading)
    return dx.astype(x.dtype), d_scale_D, None if bias_D is None else d_bias_D


norm.defvjp(_norm_forward, _norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_beside(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, how: Norm) -> tuple[jax.Array, jax.Array]:
    """`norm(x)` and `x` itself, for a residual: the gradients of the two are added before they are rounded."""
    return norm(x, scale_D, bias_D, how), x


def _norm_beside_forward(x, scale_D, bias_D, how):
    y, kept = _norm_forward(x, scale_D, bias_D, how)
    return (y, x), kept


norm_beside.defvjp(_norm_beside_forward, lambda how, kept, dy: _norm_backward(how, kept, *dy))


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
    dy_BKRE = settled(dy_BHTE.reshape(y_BKRE.shape))
    dv_BKTE = settled(_product(_turned(dy_BKRE), weights_BKRS, 3, 2))
    along_BKR1 = (dy_BKRE.astype(jnp.float32) * y_BKRE.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    d_weights_BKRS = _product(dy_BKRE, v_BKTE, 3, 3).astype(jnp.float32)
    d_scores_BKRS = weights_BKRS.astype(jnp.float32) * (d_weights_BKRS - along_BKR1)
    d_scores_BKRS = (d_scores_BKRS if slope_BKRS is None else d_scores_BKRS * slope_BKRS).astype(dtype)
    dk_BKTC = settled(_product(_turned(q_BKRC), d_scores_BKRS, 3, 2))
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
    return settled(jnp.swapaxes(x_BKRC, 2, 3))


def _product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    contracted = ((contract_a,), (contract_b,))
    return jax.lax.dot_general(a, b, (contracted, ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
