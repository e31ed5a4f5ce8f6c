"""Causal self-attention with grouped queries, rotary positions and a key-value cache.

Shapes: B batch, T queries in time, S keys in time, D width, H heads, K key-value heads, G = H / K, C head width,
E width of a head's values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models.gradients import causal_attention
from meshwright.models.layers import Linear, dropout_mask, fused_linear
from meshwright.models.layout import layout
from meshwright.models.spec import ModelSpec


class LayerCache(NamedTuple):
    """The keys and values of one layer, by position. The decoder's cache has a leading axis of layers."""

    keys_BSKC: jax.Array
    values_BSKC: jax.Array


class Rotary(NamedTuple):
    """Cosines and sines of the rotary angles of each position."""

    cos_BT1C: jax.Array
    sin_BT1C: jax.Array


class Places(NamedTuple):
    """Where the columns of a batch stand. A leading axis B may be 1."""

    positions_BT: jax.Array
    """Positions that the model is told, counted from 0 (from the start of each document where they are packed)."""
    order_T: jax.Array
    """The place of each column in the sequence: a column sees those of its own place and before."""
    rotary: Rotary | None = None
    """The angles of the positions; None: the model has learned positions."""
    segments_BT: jax.Array | None = None
    """Which document of its row a column belongs to: it sees that one only. None: the whole row."""
    weights_BT: jax.Array | None = None
    """How much a column counts in the loss, 0 or 1; None: all count."""


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
    v_BSKE: jax.Array,
    mask_BTS: jax.Array,
    *,
    rate: float = 0.0,
    kept_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention; scores and softmax in float32.

    Arguments:
        q_BTHC: queries; head `h` uses key-value head `h // G`.
        k_BSKC, v_BSKE: keys and values.
        mask_BTS: true where a query may look; B may be 1.
        rate, kept_BHTS: dropout of the attention weights; None: none is dropped.

    Returns:
        `[B, T, H, E]`, of the type of `v_BSKE`.
    """
    batch, time, heads, head_width = q_BTHC.shape
    kv_heads, keys = k_BSKC.shape[2], k_BSKC.shape[1]
    q_BTKGC = q_BTHC.reshape(batch, time, kv_heads, heads // kv_heads, head_width) * head_width**-0.5
    scores = jnp.einsum("BTKGC,BSKC->BKGTS", q_BTKGC, k_BSKC, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKE.dtype)
    if kept_BHTS is not None:
        kept = kept_BHTS.reshape(batch, kv_heads, heads // kv_heads, time, keys)
        weights = jnp.where(kept, weights / (1.0 - rate), 0.0)
    return jnp.einsum("BKGTS,BSKE->BTKGE", weights, v_BSKE).reshape(batch, time, heads, -1)


def causal_mask(order_T: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
    """`[B, T, T]`, B maybe 1: true where the key is no later than the query, and of the same segment."""
    seen = (order_T[:, None] >= order_T[None, :])[None]
    return seen if segments_BT is None else seen & (segments_BT[:, :, None] == segments_BT[:, None, :])


def whole_attention(
    q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKE: jax.Array, segments_BT: jax.Array | None
) -> jax.Array:
    """Causal attention where all of a sequence is at hand and in order.

    Arguments:
        q_BTHC, k_BTKC, v_BTKE: queries, keys and values; head `h` uses key-value head `h // G`.
        segments_BT: see `Places`.

    Returns:
        `[B, T, H, E]`, of the type of the values.
    """
    by_head = (x.swapaxes(1, 2) for x in (q_BTHC, k_BTKC, v_BTKE))
    return causal_attention(*by_head, segments_BT).swapaxes(1, 2)


def self_attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    places: Places,
    rate: float,
    dropout_keys_B: jax.Array | None,
) -> jax.Array:
    """Causal attention of a text to itself, with dropout of the attention weights where there are keys for it.

    Returns:
        `[B, T, H, E]`.
    """
    copies, place = layout().kv_copies(k_BTKC.shape[2]), layout().place
    if copies > 1:
        k_BTKC, v_BTKE = (place(x, "batch", "time", None, None) for x in (k_BTKC, v_BTKE))
        k_BTKC, v_BTKE = (jnp.repeat(x, copies, axis=2) for x in (k_BTKC, v_BTKE))
    keys_B = dropout_keys_B if rate > 0.0 else None
    key_time = "time" if keys_B is None else None  # weights are dropped by rows, so all keys must be at hand
    q_BTHC = place(q_BTHC, "batch", "time", "heads", None)
    k_BTKC, v_BTKE = (place(x, "batch", key_time, "heads", None) for x in (k_BTKC, v_BTKE))
    if keys_B is None:
        y_BTHE = layout().attention(q_BTHC, k_BTKC, v_BTKE, places.segments_BT)
    else:
        kept_BTHS = dropout_mask(rate, keys_B, 0, places.order_T, (q_BTHC.shape[2], q_BTHC.shape[1]))
        kept_BHTS = place(layout().to_columns(kept_BTHS, axis=3).swapaxes(1, 2), "batch", "heads", "time", None)
        mask_BTS = causal_mask(places.order_T, places.segments_BT)
        y_BTHE = attend(q_BTHC, k_BTKC, v_BTKE, mask_BTS, rate=rate, kept_BHTS=kept_BHTS)
    return place(y_BTHE, "batch", "time", "heads", None)


class Attention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017); `kv_heads < heads` gives grouped queries (Ainslie et al., 2023)."""

    def __init__(self, spec: ModelSpec, *, std: float, out_std: float, rngs: nnx.Rngs):
        inner, kv_inner = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
        self.query = Linear(spec.width, inner, ("width", "heads"), bias=spec.bias, std=std, rngs=rngs)
        self.key = Linear(spec.width, kv_inner, ("width", "kv_heads"), bias=spec.bias, std=std, rngs=rngs)
        self.value = Linear(spec.width, kv_inner, ("width", "kv_heads"), bias=spec.bias, std=std, rngs=rngs)
        self.out = Linear(inner, spec.width, ("heads", "width"), bias=spec.bias, std=out_std, rngs=rngs)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        places: Places,
        dropout_keys_B: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend to this text, or to the cache with this text written into it.

        Arguments:
            x_BTD: the normed residual stream.
            places: where its columns stand.
            dropout_keys_B: a random key for each example of this layer; None: no dropout.
            cache: keys and values of earlier positions.

        Returns:
            The output, `[B, T, D]`, and the new cache.
        """
        batch, time, _ = x_BTD.shape
        q, k, v = fused_linear(x_BTD, self.query, self.key, self.value)
        q_BTHC = q.reshape(batch, time, self.spec.heads, self.spec.head_width)
        k_BTKC = k.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        v_BTKC = v.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        if places.rotary is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, places.rotary), rotate(k_BTKC, places.rotary)
        if cache is None:
            y_BTHC = self_attention(q_BTHC, k_BTKC, v_BTKC, places, self.spec.dropout, dropout_keys_B)
        else:
            cache = LayerCache(
                write(cache.keys_BSKC, k_BTKC, places.positions_BT),
                write(cache.values_BSKC, v_BTKC, places.positions_BT),
            )
            seen_BTS = jnp.arange(cache.keys_BSKC.shape[1]) <= places.positions_BT[:, :, None]
            y_BTHC = attend(q_BTHC, cache.keys_BSKC, cache.values_BSKC, seen_BTS)
        return self.out(y_BTHC.reshape(batch, time, -1)), cache

    @staticmethod
    def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> LayerCache:
        """A cache of one layer for `length` positions."""
        shape = (batch, length, spec.kv_heads, spec.head_width)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cached_BS: jax.Array, new_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """A cache `[B, S, ...]` with what is new written at its positions."""
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    return cached_BS.at[rows, positions_BT].set(new_BT.astype(cached_BS.dtype))
