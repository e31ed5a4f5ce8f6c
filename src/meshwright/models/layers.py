"""The smallest parts: linear map, norms, dropout.

Shapes: B batch, T time, D width. Parameters are float32; each part computes in the type of what it is given.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshwright.models import float8, gradients
from meshwright.models.layout import layout


class LowRank(nnx.Module):
    """What is added to a linear map of which only this is trained: `x @ a @ b * scale` (LoRA; Hu et al., 2021).

    Arguments:
        a, b: `[fan_in, rank]` and `[rank, fan_out]`.
        scale: a number.
    """

    def __init__(self, a: nnx.Param, b: nnx.Param, scale: float):
        self.a, self.b, self.scale = a, b, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = checkpoint_name(gradients.linear(x, self.a[...]), "product")
        return self.scale * gradients.linear(inner, self.b[...])

    def kernel(self) -> jax.Array:
        """The kernel of the same map."""
        return self.scale * (self.a[...] @ self.b[...])


class Linear(nnx.Module):
    """`y = x @ kernel + bias`, and what `lora` adds where there is one.

    Arguments:
        fan_in, fan_out: widths of input and output.
        axes: the names of the kernel's two axes; a layout may cut the kernel along them.
        bias: whether to add one; it starts at zero.
        std: standard deviation of the normal distribution that the kernel starts from.
    """

    lora: LowRank | None = None

    def __init__(
        self, fan_in: int, fan_out: int, axes: tuple[str | None, str | None], *, bias: bool, std: float, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (fan_in, fan_out)), axes=axes)
        self.bias = nnx.Param(jnp.zeros(fan_out), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return fused_linear(x, self)[0]

    def product(self, x: jax.Array) -> jax.Array:
        """The same without the bias."""
        y = _product(x, self.kernel[...])
        return y if self.lora is None else y + self.lora(x)

    def whole_kernel(self) -> jax.Array:
        """The kernel of all that the map does, `[fan_in, fan_out]`."""
        return self.kernel[...] if self.lora is None else self.kernel[...] + self.lora.kernel()


def joins_linears() -> bool:
    """Whether several linear maps of one input are best made one, on a device like those here.

    On a GPU, taking the result apart costs more than the wider product saves.
    """
    return jax.default_backend() != "gpu"


def fused_linear(x: jax.Array, *linears: Linear) -> list[jax.Array]:
    """Several linear maps of one input as a single, wider matrix product, where this pays.

    The layout may say that it doesn't. In float8 maps would share scales in the backward pass, and what they get would
    depend on the layout.

    Arguments:
        x: `[..., fan_in]`.
        linears: maps of that fan-in, all with a bias or all without.

    Returns:
        For each map its output, `[..., fan_out]`.
    """
    apart = not layout().fuse_linear or float8.in_use() or not joins_linears()
    if apart and len(linears) > 1:
        return [fused_linear(x, linear)[0] for linear in linears]
    kernel = jnp.concatenate([linear.kernel[...] for linear in linears], axis=1)
    y = _product(x, kernel)
    biases = [linear.bias[...] for linear in linears if linear.bias is not None]
    if biases:
        y = gradients.add_bias(y, jnp.concatenate(biases))
    borders, start = [], 0
    for linear in linears[:-1]:
        start += linear.kernel.shape[1]
        borders.append(start)
    parts = zip(jnp.split(y, borders, axis=-1), linears, strict=True)
    return [part if linear.lora is None else part + linear.lora(x) for part, linear in parts]


def _product(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    multiply = float8.linear if float8.in_use() else gradients.linear
    return checkpoint_name(multiply(x, kernel_IO), "product")


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias (Ba et al., 2016), computed in float32."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(width), axes=("norm",))
        self.how = gradients.Norm(True, eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return gradients.norm(x, self.scale[...], self.bias[...], self.how)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed `x`, and `x` for the residual."""
        return gradients.norm_beside(x, self.scale[...], self.bias[...], self.how)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width), axes=("norm",))
        self.how = gradients.Norm(False, eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return gradients.norm(x, self.scale[...], None, self.how)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed `x`, and `x` for the residual."""
        return gradients.norm_beside(x, self.scale[...], None, self.how)


def dropout(x_BTD: jax.Array, rate: float, keys_B: jax.Array | None, site: int, order_T: jax.Array) -> jax.Array:
    """Zero a share of `x`, and scale up the rest.

    Arguments:
        x_BTD: the activations.
        rate: the share to drop.
        keys_B: a random key for each example; None: nothing is dropped.
        site: tells apart the places of one layer that drop.
        order_T: the place of each column in the sequence.
    """
    if keys_B is None or rate == 0.0:
        return x_BTD
    kept_BTD = dropout_mask(rate, keys_B, site, order_T, x_BTD.shape[2:])
    return jnp.where(kept_BTD, x_BTD / (1.0 - rate), 0.0)


def dropout_mask(rate: float, keys_B: jax.Array, site: int, order_T: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which activations stay, `[B, T, *shape]`.

    Each token has a key of its own, made from the key of its example and its place in the sequence; so what is dropped
    depends neither on how the batch is cut up nor on the order in which its columns lie.
    """
    fold = jax.random.fold_in

    def of_token(key: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.bernoulli(fold(fold(key, site), place), 1.0 - rate, shape)

    return jax.vmap(jax.vmap(of_token, in_axes=(None, 0)), in_axes=(0, None))(keys_B, order_T)
