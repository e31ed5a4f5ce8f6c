"""Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads come from one vector a token.

Shapes: B batch, T queries in time, S keys in time, D width, H heads, C width of a head's unrotated part, R of its
rotated part, K = C + R, E width of a head's values, Q width of the queries' latent vector, Z of the keys' and values'.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models import rope
from meshwright.models.attention import FromStart, Places, rotate, self_attention, write
from meshwright.models.gradients import Scoring
from meshwright.models.layers import Linear, RMSNorm, fused_linear
from meshwright.models.layout import layout
from meshwright.models.spec import ModelSpec


class LatentCache(NamedTuple):
    """What one layer keeps of each position. The decoder's cache has a leading axis of layers."""

    latents_BSZ: jax.Array
    """Normed latent vectors, from which every head's keys and values are made."""
    rotated_BSR: jax.Array
    """The rotated part of the keys, the same for all heads."""


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434, section 2.1).

    Keys and values are made from a latent vector much narrower than they are, and queries may be too. Positions are
    told by a part of each head that is rotated; the key of that part is one for all heads and isn't latent.

    Arguments:
        spec: the architecture.
        std: standard deviation of the initial kernels, that of the output excepted.
        out_std: of the initial kernel of the output.
        rngs: the stream `params` gives the initial parameters.
    """

    def __init__(self, spec: ModelSpec, *, std: float, out_std: float, rngs: nnx.Rngs):
        query_width = spec.heads * (spec.head_width + spec.rotary_width)
        self.value_width = spec.value_width or spec.head_width

        def to_latent(width: int) -> Linear:
            return Linear(spec.width, width, ("width", None), bias=False, std=std, rngs=rngs)

        def to_heads(latent: int, width: int) -> Linear:
            return Linear(latent, width, ("latent", "heads"), bias=False, std=std, rngs=rngs)

        if spec.query_latent:
            self.query_latent = to_latent(spec.query_latent)
            self.query_norm = RMSNorm(spec.query_latent, eps=spec.norm_eps)
            self.query = to_heads(spec.query_latent, query_width)
        else:
            self.query = Linear(spec.width, query_width, ("width", "heads"), bias=False, std=std, rngs=rngs)
        self.kv_latent = to_latent(spec.kv_latent)
        self.kv_norm = RMSNorm(spec.kv_latent, eps=spec.norm_eps)
        self.rotated_key = to_latent(spec.rotary_width)
        self.key = to_heads(spec.kv_latent, spec.heads * spec.head_width)
        self.value = to_heads(spec.kv_latent, spec.heads * self.value_width)
        inner = spec.heads * self.value_width
        self.out = Linear(inner, spec.width, ("heads", "width"), bias=False, std=out_std, rngs=rngs)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        places: Places,
        dropout_keys_B: jax.Array | None = None,
        cache: LatentCache | FromStart | None = None,
    ) -> tuple[jax.Array, LatentCache | None]:
        """Attend to this text, or to the cache with this text written into it.

        Arguments:
            x_BTD: the normed residual stream.
            places: where its columns stand; with the angles of the rotated part.
            dropout_keys_B: a random key for each example of this layer; None: no dropout.
            cache: what is kept of earlier positions; `FromStart` of it: nothing.

        Returns:
            The output, `[B, T, D]`, and the new cache.
        """
        q_BTHK, latents_BTZ, rotated_BTR = self._project(x_BTD, places)
        kept = cache.cache if isinstance(cache, FromStart) else cache
        if kept is not None:
            kept = LatentCache(
                write(kept.latents_BSZ, latents_BTZ, places.positions_BT),
                write(kept.rotated_BSR, rotated_BTR, places.positions_BT),
            )
        if kept is None or isinstance(cache, FromStart):
            k_BTHK, v_BTHE = self._keys_and_values(latents_BTZ, rotated_BTR)
            y_BTHE = self_attention(q_BTHK, k_BTHK, v_BTHE, places, self.spec.dropout, dropout_keys_B, self._scoring)
        else:
            y_BTHE = self._attend_to_latents(q_BTHK, kept, places.positions_BT)
        return self.out(y_BTHE.reshape(*x_BTD.shape[:2], -1)), kept

    def _project(self, x_BTD: jax.Array, places: Places) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries; normed latent vectors; the rotated part of the keys."""
        assert places.rotary is not None
        # An engine may cut x along time over devices that cut heads too: it's the narrow latents it should gather.
        if self.spec.query_latent:
            q_BTQ, latents_BTZ, rotated_BTR = fused_linear(x_BTD, self.query_latent, self.kv_latent, self.rotated_key)
            q = self.query(layout().place(self.query_norm(q_BTQ), "batch", "time", None))
        else:
            q, latents_BTZ, rotated_BTR = fused_linear(x_BTD, self.query, self.kv_latent, self.rotated_key)
        latents_BTZ = layout().place(self.kv_norm(latents_BTZ), "batch", "time", None)
        rotated_BTR = rotate(rotated_BTR[:, :, None], places.rotary)[:, :, 0]
        q_BTHK = q.reshape(*x_BTD.shape[:2], self.spec.heads, -1)
        q_BTHC, q_BTHR = jnp.split(q_BTHK, [self.spec.head_width], axis=-1)
        return jnp.concatenate([q_BTHC, rotate(q_BTHR, places.rotary)], axis=-1), latents_BTZ, rotated_BTR

    def _keys_and_values(self, latents_BTZ: jax.Array, rotated_BTR: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = fused_linear(latents_BTZ, self.key, self.value)
        k_BTHC, v_BTHE = (x.reshape(*x.shape[:2], self.spec.heads, -1) for x in (k, v))
        k_BTHR = jnp.broadcast_to(rotated_BTR[:, :, None], (*k_BTHC.shape[:3], self.spec.rotary_width))
        return jnp.concatenate([k_BTHC, k_BTHR], axis=-1), v_BTHE

    def _attend_to_latents(self, q_BTHK: jax.Array, cache: LatentCache, positions_BT: jax.Array) -> jax.Array:
        """The same as `attend` to the keys and values of the cached latent vectors, without making any of these.

        Both are linear in the latent vector, so the key's map can be applied to the query, and the value's to the
        weighted sum (section 2.1.2 of the paper).
        """
        dtype = q_BTHK.dtype
        q_BTHC, q_BTHR = jnp.split(q_BTHK * self._scoring.scale, [self.spec.head_width], axis=-1)
        q_BTHZ = jnp.einsum("BTHC,ZHC->BTHZ", q_BTHC, self._kernel_of_heads(self.key, dtype))
        exact = jnp.float32
        scores_BHTS = jnp.einsum("BTHZ,BSZ->BHTS", q_BTHZ, cache.latents_BSZ, preferred_element_type=exact)
        scores_BHTS += jnp.einsum("BTHR,BSR->BHTS", q_BTHR, cache.rotated_BSR, preferred_element_type=exact)
        seen_BTS = jnp.arange(cache.latents_BSZ.shape[1]) <= positions_BT[:, :, None]
        scores_BHTS = jnp.where(seen_BTS[:, None], scores_BHTS, jnp.finfo(exact).min)
        weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(dtype)
        y_BTHZ = jnp.einsum("BHTS,BSZ->BTHZ", weights_BHTS, cache.latents_BSZ)
        return jnp.einsum("BTHZ,ZHE->BTHE", y_BTHZ, self._kernel_of_heads(self.value, dtype))

    @property
    def _scoring(self) -> Scoring:
        return Scoring(rope.latent_scale(self.spec))

    def _kernel_of_heads(self, linear: Linear, dtype: jnp.dtype) -> jax.Array:
        kernel = linear.whole_kernel().astype(dtype)
        return kernel.reshape(len(kernel), self.spec.heads, -1)

    @staticmethod
    def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> LatentCache:
        """A cache of one layer for `length` positions."""
        return LatentCache(
            jnp.zeros((batch, length, spec.kv_latent), dtype), jnp.zeros((batch, length, spec.rotary_width), dtype)
        )
