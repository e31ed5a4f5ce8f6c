"""Attention by cuDNN's fused kernels, which never write the scores out (Dao et al., 2022, "FlashAttention").

They are for NVIDIA GPUs and 16-bit activations, and not for every shape. Elsewhere the plain path serves; which of the
two is taken is settled when a function is traced. Shapes as in `meshwright.models.attention`, and W width of a head in
the kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.gradients import Scoring
from meshwright.models.layout import layout

_TYPES = (jnp.bfloat16, jnp.float16)


def fused_attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    segments_BT: jax.Array | None,
    window: Any,
    scoring: Scoring,
) -> jax.Array | None:
    """Causal attention by a fused kernel; arguments as in `meshwright.models.attention.whole_attention`.

    Returns:
        `[B, T, H, E]`; None where there is no kernel for it.
    """
    if not applies(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring):
        return None
    return _kernel(q_BTHC, k_BTKC, v_BTKE, _same_segment(segments_BT), window, scoring.scale)


def applies(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    segments_BT: jax.Array | None,
    window: Any,
    scoring: Scoring,
) -> bool:
    """Whether there is a kernel for this: on this device, for these shapes and types, and this window.

    A bound of the scores there is none for; a window must be a number that is known when the function is traced, and
    the number of columns even, or the backward pass is refused.
    """
    if not layout().fused_attention or jax.default_backend() != "gpu" or q_BTHC.dtype not in _TYPES or scoring.softcap:
        return False
    if not isinstance(window, int | None) or q_BTHC.shape[1] % 2:
        return False
    mask = None if segments_BT is None else jax.eval_shape(_same_segment, segments_BT)
    try:
        jax.eval_shape(partial(_kernel, window=window, scale=scoring.scale), q_BTHC, k_BTKC, v_BTKE, mask)
    except (NotImplementedError, RuntimeError, ValueError):  # JAX checks the version, the card and the shapes
        return False
    return True


def kernel_width(key_width: int, value_width: int) -> int:
    """Width of a head in the kernel, for queries, keys and values alike."""
    return max(key_width, value_width)


def _same_segment(segments_BT: jax.Array | None) -> jax.Array | None:
    return None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None, :]


def _kernel(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    mask_B1TS: jax.Array | None,
    window: int | None,
    scale: float,
) -> jax.Array:
    # The kernel has one width for all three: zeros add nothing to scores, and are cut off what comes of the values.
    value_width = v_BTKE.shape[-1]
    width = kernel_width(q_BTHC.shape[-1], value_width)
    q_BTHW, k_BTKW, v_BTKW = (_widened(x, width) for x in (q_BTHC, k_BTKC, v_BTKE))
    y_BTHW = jax.nn.dot_product_attention(
        q_BTHW,
        k_BTKW,
        v_BTKW,
        mask=mask_B1TS,
        is_causal=True,
        scale=scale,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return y_BTHW[..., :value_width]


def _widened(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
