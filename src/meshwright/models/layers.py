"""The smallest parts: linear map, norms, dropout.

Shapes: B batch, T time, D width. Parameters are float32; each part computes in the type of what it is given.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models import gradients


class Linear(nnx.Module):
    """`y = x @ kernel + bias`.

    Arguments:
        fan_in, fan_out: widths of input and output.
        bias: whether to add one; it starts at zero.
        std: standard deviation of the normal distribution that the kernel starts from.
    """

    def __init__(self, fan_in: int, fan_out: int, *, bias: bool, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (fan_in, fan_out)))
        self.bias = nnx.Param(jnp.zeros(fan_out)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return fused_linear(x, self)[0]


def fused_linear(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """Several linear maps of one input as a single, wider matrix product.

    Arguments:
        x: `[..., fan_in]`.
        linears: maps of that fan-in, all with a bias or all without.

    Returns:
        For each map its output, `[..., fan_out]`.
    """
    kernel = jnp.concatenate([linear.kernel[...] for linear in linears], axis=1)
    y = gradients.linear(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)
    biases = [linear.bias[...] for linear in linears if linear.bias is not None]
    if biases:
        y += jnp.concatenate(biases).astype(x.dtype)
    borders, start = [], 0
    for linear in linears[:-1]:
        start += linear.kernel.shape[1]
        borders.append(start)
    return jnp.split(y, borders, axis=-1)


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias (Ba et al., 2016), computed in float32."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return gradients.layer_norm(x, self.scale[...], self.bias[...], self.eps)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return gradients.rms_norm(x, self.scale[...], self.eps)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, site: int) -> jax.Array:
    """Zero a share of `x`, and scale up the rest.

    Each example has a key of its own, so that what is dropped doesn't depend on how the batch is cut up.

    Arguments:
        x: `[B, ...]`.
        rate: the share to drop.
        keys_B: a random key for each example; None: nothing is dropped.
        site: tells apart the places of one layer that drop.
    """
    if keys_B is None or rate == 0.0:
        return x

    def keep_one(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape[1:])

    return jnp.where(jax.vmap(keep_one)(keys_B), x / (1.0 - rate), 0.0)
