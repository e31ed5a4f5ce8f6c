"""A kernel for `meshwright.models.one_token`: a token goes into the key-value cache, and attends to what is there.

Shapes: P parts of a sum, B texts, S cached positions, H heads, K key-value heads, C head width, J = H + 2 K, I = J C.
In the kernel, Q queries of a key-value head with padding, N positions of a block, E half of C.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshwright.models import kernels
from meshwright.models.attention import Attention, LayerCache, Places, Rotary
from meshwright.models.kernels import call, dot, load

_POSITIONS = 64  # of a block
_WARPS, _STAGES = 4, 3


def attend(
    heads_PBI: jax.Array, places: Places, cache: LayerCache, attention: Attention
) -> tuple[jax.Array, LayerCache]:
    """Write one token of each text into a cache, and attend to what it may see of that.

    Arguments:
        heads_PBI: its queries, keys and values, neither normed nor rotated, side by side, in parts yet to be added up.
        places: where it stands; beyond the end of the cache it isn't written.
        cache: keys and values of earlier positions.
        attention: its norms of heads, if it has any, and the scale of its scores.

    Returns:
        `[B, H, C]`, of the type of the cache, and the cache with the token.
    """
    batch, kv_heads, _, head_width = cache.keys_BKSC.shape
    heads_PBJC = heads_PBI.reshape(*heads_PBI.shape[:2], -1, head_width)
    heads = heads_PBJC.shape[2] - 2 * kv_heads
    position_B, rotary = places.positions_BT[:, 0], places.rotary
    first_B = jnp.zeros_like(position_B) if places.window is None else jnp.maximum(position_B - places.window + 1, 0)
    if rotary is not None:
        rotary = Rotary(*(jnp.broadcast_to(angles, (batch, 1, 1, head_width)) for angles in rotary))
    norms_C, eps = None, 0.0
    if attention.spec.qk_norm != "none":
        norms_C, eps = [norm.scale[...] for norm in (attention.query_norm, attention.key_norm)], attention.spec.norm_eps
    token = _Token(heads_PBJC, position_B, first_B, norms_C, rotary, cache)
    y = jax.ShapeDtypeStruct((batch, heads, head_width), cache.keys_BKSC.dtype)
    shapes = [y, *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cache)]
    last = len(jax.tree.leaves(token)) - 1
    kernel = partial(_attend, heads=heads, kv_heads=kv_heads, scale=attention.scoring.scale, eps=eps)
    options: dict[str, Any] = {"name": "attend", "warps": _WARPS, "stages": _STAGES, "written": {last - 1: 1, last: 2}}
    y_BHC, *written = call(kernel, (batch, kv_heads), shapes, token, **options)
    return y_BHC, LayerCache(*written)


class _Token(NamedTuple):
    heads_PBJC: Any
    position_B: Any
    first_B: Any
    """The first position that the token sees."""
    norms_C: Any
    """The scales of the norms of queries and keys; None: there are none."""
    rotary: Any
    cache: LayerCache


def _attend(
    refs: _Token, y_ref: Any, keys_ref: Any, values_ref: Any, *, heads: int, kv_heads: int, scale: float, eps: float
) -> None:
    text, kv_head, dtype = pl.program_id(0), pl.program_id(1), y_ref.dtype
    group, half = heads // kv_heads, y_ref.shape[2] // 2
    queries = max(kernels.LEAST_TILE, pl.next_power_of_2(group))
    position, first = refs.position_B[text], refs.first_B[text]
    halves, mine = (pl.ds(0, half), pl.ds(half, half)), pl.ds(kv_head * group, queries)
    inside_QE = jnp.broadcast_to(jnp.arange(queries)[:, None] < group, (queries, half))

    def whole(head: Any, part: Any, inside: jax.Array | None = None) -> jax.Array:
        parts = pl.ds(0, refs.heads_PBJC.shape[0])
        return load(refs.heads_PBJC.at[parts, text, head, part], inside).sum(axis=0).astype(dtype)

    q_QE, k_E = [whole(mine, part, inside_QE) for part in halves], [whole(heads + kv_head, part) for part in halves]
    if refs.norms_C is not None:
        q_QE, k_E = (_normed(x, scale_C, eps) for x, scale_C in zip((q_QE, k_E), refs.norms_C, strict=True))
    q_QE, k_E = _rotated(refs, text, q_QE), _rotated(refs, text, k_E)
    v_E = [whole(heads + kv_heads + kv_head, part) for part in halves]
    length = keys_ref.shape[2]
    has_place = jnp.broadcast_to(position < length, (half,))
    for new_E, ref in ((k_E, keys_ref), (v_E, values_ref)):
        for new, part in zip(new_E, halves, strict=True):
            kernels.triton.store(ref.at[text, kv_head, position, part], new, mask=has_place)

    def one(block: jax.Array, carry: tuple) -> tuple:
        """One more block of positions, softmax being taken of those so far (Milakov and Gimelshein, 2018)."""
        highest_Q, total_Q, y_QE = carry
        place_N = block * _POSITIONS + jnp.arange(_POSITIONS)
        seen_N = (place_N < position) & (place_N >= first) & (place_N < length)

        def cached(ref: Any, part: Any) -> jax.Array:
            return load(ref.at[text, kv_head, pl.ds(block * _POSITIONS, _POSITIONS), part], seen_N[:, None])

        scores_QN = scale * sum(
            dot(q, cached(refs.cache.keys_BKSC, part), 1, 1) for q, part in zip(q_QE, halves, strict=True)
        )
        scores_QN = jnp.where(seen_N[None], scores_QN, float(jnp.finfo(jnp.float32).min))
        higher_Q = jnp.maximum(highest_Q, scores_QN.max(axis=1))
        weights_QN, shrink_Q = jnp.exp(scores_QN - higher_Q[:, None]), jnp.exp(highest_Q - higher_Q)
        rounded_QN = weights_QN.astype(dtype)
        y_QE = [
            y * shrink_Q[:, None] + dot(rounded_QN, cached(refs.cache.values_BKSC, part), 1, 0)
            for y, part in zip(y_QE, halves, strict=True)
        ]
        return higher_Q, total_Q * shrink_Q + weights_QN.sum(axis=1), y_QE

    # It starts with the token itself, whose key and value are at hand.
    exact = [(q.astype(jnp.float32), k.astype(jnp.float32)) for q, k in zip(q_QE, k_E, strict=True)]
    own_Q = scale * sum((q * k[None]).sum(axis=1) for q, k in exact)
    own_QE = [jnp.broadcast_to(v.astype(jnp.float32)[None], (queries, half)) for v in v_E]
    blocks = jax.lax.div(first, _POSITIONS), jax.lax.div(position + (_POSITIONS - 1), _POSITIONS)
    _, total_Q, y_QE = jax.lax.fori_loop(*blocks, one, (own_Q, jnp.ones(queries, jnp.float32), own_QE))
    for y, part in zip(y_QE, halves, strict=True):
        kernels.triton.store(y_ref.at[text, mine, part], (y / total_Q[:, None]).astype(dtype), mask=inside_QE)


def _normed(halves: list[jax.Array], scale_ref: Any, eps: float) -> list[jax.Array]:
    """The halves of queries or keys, `[..., E]`, over the root of their mean square, and times a scale."""
    exact, half = [part.astype(jnp.float32) for part in halves], halves[0].shape[-1]
    inverse = jax.lax.rsqrt(sum((part * part).sum(axis=-1) for part in exact) / (2 * half) + eps)[..., None]
    scales = scale_ref[pl.ds(0, half)], scale_ref[pl.ds(half, half)]
    return [(part * inverse * scale).astype(halves[0].dtype) for part, scale in zip(exact, scales, strict=True)]


def _rotated(refs: _Token, text: jax.Array, halves: list[jax.Array]) -> list[jax.Array]:
    """The halves of queries or keys, `[..., E]`, turned by the angles of the token's position, which both share."""
    if refs.rotary is None:
        return halves
    low, high = (half.astype(jnp.float32) for half in halves)
    cos_E, sin_E = (angles[text, 0, 0, pl.ds(0, low.shape[-1])] for angles in refs.rotary)
    turned = low * cos_E - high * sin_E, high * cos_E + low * sin_E
    return [half.astype(halves[0].dtype) for half in turned]
