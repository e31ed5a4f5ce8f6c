"""Rotary positions stretched beyond the length that a model was first trained on.

Shapes: F = half the width that is rotated, the waves.
"""

import math

import jax
import jax.numpy as jnp

from meshwright.models.attention import Rotary, rotary, wave_frequencies
from meshwright.models.spec import ModelSpec


def angles(spec: ModelSpec, positions_BT: jax.Array, *, local: bool = False) -> Rotary:
    """The rotary angles of positions.

    Arguments:
        spec: base, stretching, and the width that is rotated.
        positions_BT: counted from 0.
        local: those of layers with a window, where they have a base of their own.
    """
    width = spec.rotary_width if spec.attention == "latent" else spec.head_width
    if local:
        return rotary(positions_BT, wave_frequencies(width, spec.local_rope_theta))
    return rotary(positions_BT, frequencies(spec, width), growth(spec))


def frequencies(spec: ModelSpec, width: int) -> jax.Array:
    """Radians a position of each wave, `[F]`.

    Arguments:
        spec: base and stretching.
        width: that is rotated.
    """
    plain_F = wave_frequencies(width, spec.rope_theta)
    if spec.rope_scaling == "linear":  # Chen et al., 2023
        return plain_F / spec.rope_factor
    if spec.rope_scaling == "llama3":  # Grattafiori et al., 2024
        turns_F = spec.rope_original_length * plain_F / (2 * math.pi)
        low, high = spec.rope_low_frequency, spec.rope_high_frequency
        kept_F = jnp.clip((turns_F - low) / (high - low), 0.0, 1.0)
    elif spec.rope_scaling == "yarn":  # Peng et al., 2023
        first, last = (_wave_of(spec, width, turns) for turns in (spec.rope_beta_fast, spec.rope_beta_slow))
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        ramp_F = (jnp.arange(width // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
        kept_F = 1.0 - jnp.clip(ramp_F, 0.0, 1.0)
    else:
        return plain_F
    return plain_F / spec.rope_factor * (1.0 - kept_F) + plain_F * kept_F


def growth(spec: ModelSpec) -> float:
    """What rotated queries and keys are multiplied by each."""
    if spec.rope_scaling != "yarn":
        return 1.0
    if spec.rope_mscale and spec.rope_mscale_all:
        return _grown(spec, spec.rope_mscale) / _grown(spec, spec.rope_mscale_all)
    return _grown(spec, 1.0)


def latent_scale(spec: ModelSpec) -> float:
    """What the scores of latent attention are multiplied by."""
    plain = (spec.head_width + spec.rotary_width) ** -0.5
    if spec.rope_scaling != "yarn" or not spec.rope_mscale_all:
        return plain
    return plain * _grown(spec, spec.rope_mscale_all) ** 2


def _grown(spec: ModelSpec, much: float) -> float:
    return 0.1 * much * math.log(spec.rope_factor) + 1.0 if spec.rope_factor > 1 else 1.0


def _wave_of(spec: ModelSpec, width: int, turns: float) -> float:
    """Which wave turns so often within the original length."""
    return width * math.log(spec.rope_original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))
