"""Causal self-attention with grouped queries, rotary positions and a key-value cache.

Shapes: B batch, T queries in time, S keys in time, D width, H heads, K key-value heads, G = H / K, C head width,
E width of a head's values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models.flash import fused_attention
from meshwright.models.gradients import Scoring, capped, causal_attention
from meshwright.models.layers import Linear, RMSNorm, dropout_mask, fused_linear
from meshwright.models.layout import layout
from meshwright.models.spec import ModelSpec


class LayerCache(NamedTuple):
    """The keys and values of one layer, by position. The decoder's cache has a leading axis of layers."""

    keys_BKSC: jax.Array
    values_BKSC: jax.Array


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
    window: jax.Array | int | None = None
    """How many columns one sees, itself included, `[]`; None: all before it."""
    local_rotary: Rotary | None = None
    """The angles in layers with a window, where these have their own; `of_layer` puts them into `rotary`."""

    def of_layer(self, window: jax.Array | int, *, reached: bool) -> "Places":
        """What one layer is told.

        Arguments:
            window: how many columns one sees in this layer, itself included, `[]`; 0: all before it. A number, where it
                is known when the layer is traced.
            reached: whether there can be columns that a window leaves out.
        """
        rotary = self.rotary
        if isinstance(window, int):
            local = self.local_rotary if window and self.local_rotary is not None else rotary
            return self._replace(rotary=local, local_rotary=None, window=window if window and reached else None)
        if self.local_rotary is not None and rotary is not None:
            rotary = Rotary(*(jnp.where(window > 0, *pair) for pair in zip(self.local_rotary, rotary, strict=True)))
        all_before = jnp.iinfo(jnp.int32).max
        window_or_all = jnp.where(window > 0, window, all_before) if reached else None
        return self._replace(rotary=rotary, local_rotary=None, window=window_or_all)


def rotary_angles(positions_BT: jax.Array, head_width: int, theta: float) -> Rotary:
    """Angles of rotary position embedding (Su et al., 2021), in the half-split layout.

    Arguments:
        positions_BT: positions in time, counted from 0.
        head_width: even.
        theta: base of the wavelengths.
    """
    return rotary(positions_BT, wave_frequencies(head_width, theta))


def wave_frequencies(head_width: int, theta: float) -> jax.Array:
    """Radians a position of each wave, half as many as `head_width`; arguments as in `rotary_angles`."""
    return theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)


def rotary(positions_BT: jax.Array, frequencies: jax.Array, growth: float = 1.0) -> Rotary:
    """The angles of positions.

    Arguments:
        positions_BT: positions in time, counted from 0.
        frequencies: radians a position of each wave.
        growth: what is turned is multiplied by this.
    """
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    if growth == 1.0:
        return Rotary(jnp.cos(angles), jnp.sin(angles))
    return Rotary(growth * jnp.cos(angles), growth * jnp.sin(angles))


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
    scoring: Scoring | None = None,
    rate: float = 0.0,
    kept_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention; scores and softmax in float32.

    Arguments:
        q_BTHC: queries; head `h` uses key-value head `h // G`.
        k_BSKC, v_BSKE: keys and values.
        mask_BTS: true where a query may look; B may be 1.
        scoring: None: the usual scale, one over the root of C, and no bound.
        rate, kept_BHTS: dropout of the attention weights; None: none is dropped.

    Returns:
        `[B, T, H, E]`, of the type of `v_BSKE`.
    """
    batch, time, heads, head_width = q_BTHC.shape
    kv_heads, keys = k_BSKC.shape[2], k_BSKC.shape[1]
    scoring = scoring or Scoring(head_width**-0.5)
    q_BTKGC = q_BTHC.reshape(batch, time, kv_heads, heads // kv_heads, head_width) * scoring.scale
    scores = jnp.einsum("BTKGC,BSKC->BKGTS", q_BTKGC, k_BSKC, preferred_element_type=jnp.float32)
    scores, _ = capped(scores, scoring.softcap)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKE.dtype)
    if kept_BHTS is not None:
        kept = kept_BHTS.reshape(batch, kv_heads, heads // kv_heads, time, keys)
        weights = jnp.where(kept, weights / (1.0 - rate), 0.0)
    return jnp.einsum("BKGTS,BSKE->BTKGE", weights, v_BSKE).reshape(batch, time, heads, -1)


def causal_mask(
    order_T: jax.Array, segments_BT: jax.Array | None = None, window: jax.Array | int | None = None
) -> jax.Array:
    """`[B, T, T]`, B maybe 1: true where the key is no later than the query, of the same segment and in its window."""
    seen = (order_T[:, None] >= order_T[None, :])[None]
    if window is not None:
        seen = seen & (order_T[:, None] - order_T[None, :] < window)
    return seen if segments_BT is None else seen & (segments_BT[:, :, None] == segments_BT[:, None, :])


def whole_attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    segments_BT: jax.Array | None,
    window: jax.Array | int | None = None,
    scoring: Scoring | None = None,
) -> jax.Array:
    """Causal attention where all of a sequence is at hand and in order.

    Arguments:
        q_BTHC, k_BTKC, v_BTKE: queries, keys and values; head `h` uses key-value head `h // G`.
        segments_BT, window: see `Places`.
        scoring: see `attend`.

    Returns:
        `[B, T, H, E]`, of the type of the values.
    """
    scoring = scoring or Scoring(q_BTHC.shape[-1] ** -0.5)
    y_BTHE = fused_attention(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring)
    if y_BTHE is not None:
        return y_BTHE
    by_head = (x.swapaxes(1, 2) for x in (q_BTHC, k_BTKC, v_BTKE))
    return causal_attention(*by_head, segments_BT, window_array(window), scoring).swapaxes(1, 2)


def window_array(window: jax.Array | int | None) -> jax.Array | None:
    """A window as an array, `[]`, where there is one."""
    return None if window is None else jnp.asarray(window, jnp.int32)


def self_attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    places: Places,
    rate: float,
    dropout_keys_B: jax.Array | None,
    scoring: Scoring | None = None,
) -> jax.Array:
    """Causal attention of a text to itself, with dropout of the attention weights where there are keys for it.

    Arguments:
        q_BTHC, k_BTKC, v_BTKE: queries, keys and values; head `h` uses key-value head `h // G`.
        places: where their columns stand.
        rate, dropout_keys_B: the share of weights to drop, and a random key for each example.
        scoring: see `attend`.

    Returns:
        `[B, T, H, E]`.
    """
    scoring = scoring or Scoring(q_BTHC.shape[-1] ** -0.5)
    copies, place = layout().kv_copies(k_BTKC.shape[2]), layout().place
    if copies > 1:
        k_BTKC, v_BTKE = (place(x, "batch", "time", None, None) for x in (k_BTKC, v_BTKE))
        k_BTKC, v_BTKE = (jnp.repeat(x, copies, axis=2) for x in (k_BTKC, v_BTKE))
    keys_B = dropout_keys_B if rate > 0.0 else None
    key_time = "time" if keys_B is None else None  # weights are dropped by rows, so all keys must be at hand
    q_BTHC = place(q_BTHC, "batch", "time", "heads", None)
    k_BTKC, v_BTKE = (place(x, "batch", key_time, "heads", None) for x in (k_BTKC, v_BTKE))
    if keys_B is None:
        y_BTHE = layout().attention(q_BTHC, k_BTKC, v_BTKE, places.segments_BT, places.window, scoring)
    else:
        kept_BTHS = dropout_mask(rate, keys_B, 0, places.order_T, (q_BTHC.shape[2], q_BTHC.shape[1]))
        kept_BHTS = place(layout().to_columns(kept_BTHS, axis=3).swapaxes(1, 2), "batch", "heads", "time", None)
        mask_BTS = causal_mask(places.order_T, places.segments_BT, places.window)
        y_BTHE = attend(q_BTHC, k_BTKC, v_BTKE, mask_BTS, scoring=scoring, rate=rate, kept_BHTS=kept_BHTS)
    return place(y_BTHE, "batch", "time", "heads", None)


class FromStart(NamedTuple):
    """The cache of a layer where the columns are a text from its start, in order, and see no more than themselves."""

    cache: Any


class Attention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017); `kv_heads < heads` gives grouped queries (Ainslie et al., 2023)."""

    def __init__(self, spec: ModelSpec, *, std: float, out_std: float, rngs: nnx.Rngs):
        inner, kv_inner = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
        bias = spec.bias or spec.qkv_bias
        self.query = Linear(spec.width, inner, ("width", "heads"), bias=bias, std=std, rngs=rngs)
        self.key = Linear(spec.width, kv_inner, ("width", "kv_heads"), bias=bias, std=std, rngs=rngs)
        self.value = Linear(spec.width, kv_inner, ("width", "kv_heads"), bias=bias, std=std, rngs=rngs)
        self.out = Linear(inner, spec.width, ("heads", "width"), bias=spec.bias, std=out_std, rngs=rngs)
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "all"
            self.query_norm = RMSNorm(inner if whole else spec.head_width, eps=spec.norm_eps)
            self.key_norm = RMSNorm(kv_inner if whole else spec.head_width, eps=spec.norm_eps)
        self.scoring = Scoring(spec.attention_scale or spec.head_width**-0.5, spec.attention_softcap)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        places: Places,
        dropout_keys_B: jax.Array | None = None,
        cache: LayerCache | FromStart | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend to this text, or to the cache with this text written into it.

        Arguments:
            x_BTD: the normed residual stream.
            places: where its columns stand.
            dropout_keys_B: a random key for each example of this layer; None: no dropout.
            cache: keys and values of earlier positions; `FromStart` of it: there are none.

        Returns:
            The output, `[B, T, D]`, and the new cache.
        """
        q_BTHC, k_BTKC, v_BTKC = self._project(x_BTD)
        if places.rotary is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, places.rotary), rotate(k_BTKC, places.rotary)
        kept = cache.cache if isinstance(cache, FromStart) else cache
        if kept is not None:
            kept = LayerCache(
                write_heads(kept.keys_BKSC, k_BTKC, places.positions_BT),
                write_heads(kept.values_BKSC, v_BTKC, places.positions_BT),
            )
        if kept is None or isinstance(cache, FromStart):
            y_BTHC = self_attention(q_BTHC, k_BTKC, v_BTKC, places, self.spec.dropout, dropout_keys_B, self.scoring)
        else:
            y_BTHC = self._attend_to_cache(q_BTHC, kept, places)
        return self.out(y_BTHC.reshape(*x_BTD.shape[:2], -1)), kept

    def _attend_to_cache(self, q_BTHC: jax.Array, cache: LayerCache, places: Places) -> jax.Array:
        distance_BTS = places.positions_BT[:, :, None] - jnp.arange(cache.keys_BKSC.shape[2])
        seen_BTS = distance_BTS >= 0
        if places.window is not None:
            seen_BTS = seen_BTS & (distance_BTS < places.window)
        k_BSKC, v_BSKC = (part_BKSC.swapaxes(1, 2) for part_BKSC in cache)
        return attend(q_BTHC, k_BSKC, v_BSKC, seen_BTS, scoring=self.scoring)

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, of which the former two are normed where the spec asks for it."""
        (batch, time, _), norms = x_BTD.shape, self.spec.qk_norm
        q, k, v = fused_linear(x_BTD, self.query, self.key, self.value)
        if norms == "all":
            q, k = self.query_norm(q), self.key_norm(k)
        q_BTHC = q.reshape(batch, time, self.spec.heads, self.spec.head_width)
        k_BTKC = k.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        v_BTKC = v.reshape(batch, time, self.spec.kv_heads, self.spec.head_width)
        if norms == "head":
            q_BTHC, k_BTKC = self.query_norm(q_BTHC), self.key_norm(k_BTKC)
        return q_BTHC, k_BTKC, v_BTKC

    @staticmethod
    def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> LayerCache:
        """A cache of one layer for `length` positions."""
        shape = (batch, spec.kv_heads, length, spec.head_width)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cached_BS: jax.Array, new_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """A cache `[B, S, ...]` with what is new written at its positions."""
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    return cached_BS.at[rows, positions_BT].set(new_BT.astype(cached_BS.dtype))


def write_heads(cached_BKSC: jax.Array, new_BTKC: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """The same for a cache of heads, which lie before the positions: as products with it want them."""
    rows = jnp.arange(positions_BT.shape[0])[:, None]
    return cached_BKSC.at[rows, :, positions_BT].set(new_BTKC.astype(cached_BKSC.dtype))
