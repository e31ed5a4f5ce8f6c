"""The products of the blocks' linear maps in float8, where whoever runs the model asks for it.

A number is one of e4m3 (4 bits of exponent, 3 of mantissa, at most 448; Micikevicius et al., 2022) times a float32
scale, which those share that are summed up; compare the recipe `rowwise_with_gw_hp` of torchao (2024). A token has its
own scales and the kernel has its own, so what a token gets depends on no other token, and training neither on the size
of a micro-batch nor on how the batch is cut.

Shapes: I and O widths of input and output.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from meshwright.models import kernels
from meshwright.models.gradients import over_tokens, settled

FLOAT8 = jnp.float8_e4m3fn
LEAST_CAPABILITY = 8.9
"""Of GPUs whose tensor cores multiply it (Ada, Hopper and newer)."""

_LARGEST = float(jnp.finfo(FLOAT8).max)
_LEAST = 2.0**-100  # so that the scale of a row of zeros is a normal number, by which one can divide

_in_use: ContextVar[bool] = ContextVar("float8", default=False)


def in_use() -> bool:
    """Whether what is traced here multiplies in float8."""
    return _in_use.get()


@contextmanager
def use(on: bool) -> Iterator[None]:
    """Have the linear maps that are called while a function is traced multiply in float8, or not."""
    token = _in_use.set(on)
    try:
        yield
    finally:
        _in_use.reset(token)


def is_here() -> bool:
    """Whether the devices here multiply float8; those that aren't GPUs do it by way of another type."""
    return jax.default_backend() != "gpu" or kernels.compute_capability() >= LEAST_CAPABILITY


@jax.custom_vjp
def linear(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """`x @ kernel`, multiplied in float8; so is the gradient of `x`, while that of the kernel is the usual one.

    `x` has a scale for each token, and so has the gradient of the result; the kernel has one for each column, and in
    the backward pass one for each row. The gradient of the kernel is summed over tokens: scales that go with the sum
    would be shared by tokens, and training would depend on which of them are multiplied together. So its product stays
    in the type of `x`.

    Arguments:
        x: `[..., I]`, bfloat16 or float32.
        kernel_IO: rounded to the type of `x` before all else, as some layouts send it in that.

    Returns:
        `[..., O]`, of the type of `x`.
    """
    return _product(x, kernel_IO, over=0)


def _linear_forward(x, kernel_IO):
    return linear(x, kernel_IO), (x, kernel_IO)


def _linear_backward(kept, dy):
    x, kernel_IO = kept
    dy = settled(dy)
    return _product(dy, kernel_IO, over=1), over_tokens(settled(x), dy).astype(kernel_IO.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def quantised(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Numbers in float8, and what to multiply them by: the largest along an axis becomes the largest of float8.

    Arguments:
        x: the numbers; one that isn't finite makes what is summed up along the axis NaN.
        axis: along which they share a scale.

    Returns:
        Float8 of the shape of `x`, and float32 of that shape but for 1 in place of the axis.
    """
    exact = x.astype(jnp.float32)
    largest = jnp.abs(exact).max(axis=axis, keepdims=True)
    scale = jnp.maximum(largest, _LEAST) * (1 / _LARGEST)
    return (exact / scale).astype(FLOAT8), scale


def _product(x: jax.Array, kernel_IO: jax.Array, over: int) -> jax.Array:
    """The sum over the last axis of `x` and an axis of the kernel, of the type of `x`."""
    few, scale = quantised(x, -1)
    kernel_few, kernel_scale = quantised(kernel_IO.astype(x.dtype), over)
    contracted = ((x.ndim - 1,), (over,)), ((), ())
    y = jax.lax.dot_general(few, kernel_few, contracted, preferred_element_type=x.dtype)
    return (y.astype(jnp.float32) * scale * kernel_scale.reshape(-1)).astype(x.dtype)
