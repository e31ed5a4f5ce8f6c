"""Causal self-attention with grouped queries, rotary positions and a key-value cache.

Shapes: B batch, T queries in time, S keys in time, D width, H heads, K key-value heads, G = H / K, C head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models.gradients import causal_attention
from meshwright.models.layers import Linear, dropout, fused_linear
from meshwright.models.spec import ModelSpec


class LayerCache(NamedTuple):
    """The keys and values of one layer, by position. The decoder's cache has a leading axis of layers."""

    keys_BSKC: jax.Array
    values_BSKC: jax.Array


class Rotary(NamedTuple):
    """Cosines and sines of the rotary angles of each position."""

    cos_BT1C: jax.Array
    sin_BT1C: jax.Array


def rotary_angles(positions_BT: jax.Array, head_width: int, theta: float) -> Rotary:
    """Angles of rotary position embedding (Su et al., 2021), in the half-split layout.

    Arguments:
        positions_BT: positions in time, counted from 0.
        head_width: even.
        theta: base of the wavelengths.
    """
    frequencies = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return Rotary(jnp.cos(angles), jnp.sin(angles))


def rotate(x_BTHC: jax.Array, rotary: Rotary) -> jax.Array:
    """Turn queries or keys by the angles of their positions."""
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x_BTHC * rotary.cos_BT1C + turned * rotary.sin_BT1C).astype(x_BTHC.dtype)


def attend(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    mask_BTS: jax.Array,
    *,
    rate: float = 0.0,
    dropout_keys_B: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention; scores and softmax in float32.

    Arguments:
        q_BTHC: queries; head `h` uses key-value head `h // G`.
        k_BSKC, v_BSKC: keys and values.
        mask_BTS: true where a query may look; B may be 1.
        rate, dropout_keys_B: dropout of the attention weights.

    Returns:
        `[B, T, H, C]`, of the type of `v_BSKC`.
    """
    batch, time, heads, head_width = q_BTHC.shape
    kv_heads = k_BSKC.shape[2]
    q_BTKGC = q_BTHC.reshape(batch, time, kv_heads, heads // kv_heads, head_width) * head_width**-0.5
    scores = jnp.einsum("BTKGC,BSKC->BKGTS", q_BTKGC, k_BSKC, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKC.dtype)
    weights = dropout(weights, rate, dropout_keys_B, site=0)
    return jnp.einsum("BKGTS,BSKC->BTKGC", weights, v_BSKC).reshape(q_BTHC.shape)


def causal_mask(time: int) -> jax.Array:
    """`[1, T, T]`: true where the key is no later than the query."""
    return jnp.tril(jnp.ones((1, time, time), bool))


class Attention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017); `kv_heads < heads` gives grouped queries (Ainslie et al., 2023)."""

    def __init__(self, spec: ModelSpec, *, std: float, out_std: float, rngs: nnx.Rngs):
        inner, kv_inner = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
        self.query = Linear(spec.width, inner, bias=spec.bias, std=std, rngs=rngs)
        self.key = Linear(spec.width, kv_inner, bias=spec.bias, std=std, rngs=rngs)
        self.value = Linear(spec.width, kv_inner, bias=spec.bias, std=std, rngs=rngs)
        self.out = Linear(inner, spec.width, bias=spec.bias, std=out_std, rngs=rngs)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        rotary: Rotary | None,
        dropout_keys_B: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend to this text, or to the cache with this text written into it.

        Arguments:
            x_BTD: the normed residual stream.
            positions_BT: where each token stands; without a cache, 0 to T - 1.
            rotary: the angles of those positions; None: the model has learned positions.
            dropout_keys_B: see `dropout`.
            cache: keys and values of earlier positions.

        Returns:
            The output, `[B, T, D]`, and the new cache.
        """
        batch, time, _ = x_BTD.shape
        q, k, v = fused_linear(x_BTD, self.query, self.key, self.value)
        q_BTHC = q.reshape(batch, time, self.spec.heads, self.spec.head_width)
        k_BTKC = k.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        v_BTKC = v.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        if rotary is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotary), rotate(k_BTKC, rotary)
        if cache is not None:
            cache = _write(cache, k_BTKC, v_BTKC, positions_BT)
            seen_BTS = jnp.arange(cache.keys_BSKC.shape[1]) <= positions_BT[:, :, None]
            y_BTHC = attend(q_BTHC, cache.keys_BSKC, cache.values_BSKC, seen_BTS)
        elif dropout_keys_B is not None and self.spec.dropout > 0.0:
            y_BTHC = attend(
                q_BTHC, k_BTKC, v_BTKC, causal_mask(time), rate=self.spec.dropout, dropout_keys_B=dropout_keys_B
            )
        else:
            y_BHTC = causal_attention(*(x.swapaxes(1, 2) for x in (q_BTHC, k_BTKC, v_BTKC)))
            y_BTHC = y_BHTC.swapaxes(1, 2)
        return self.out(y_BTHC.reshape(batch, time, -1)), cache


def _write(cache: LayerCache, k_BTKC: jax.Array, v_BTKC: jax.Array, positions_BT: jax.Array) -> LayerCache:
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    return LayerCache(
        cache.keys_BSKC.at[rows, positions_BT].set(k_BTKC.astype(cache.keys_BSKC.dtype)),
        cache.values_BSKC.at[rows, positions_BT].set(v_BTKC.astype(cache.values_BSKC.dtype)),
    )
