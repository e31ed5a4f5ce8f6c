"""A decoder's blocks as stacks: parameters of like layers, with a leading axis of layers.

Layers that differ in shape from the others, such as the first ones without experts, are a stack of their own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models.spec import ModelSpec

STACKS = ("dense_blocks", "blocks")
"""The names that a decoder has its stacks under, in the order in which they are passed."""


def dense_spec(spec: ModelSpec) -> ModelSpec:
    """The architecture of the first layers, which have one feed-forward part in place of experts."""
    return spec.model_copy(update={"experts": 0, "ffn_width": spec.dense_ffn_width})


def layer_specs(spec: ModelSpec) -> list[ModelSpec]:
    """The architecture of each layer."""
    return [dense_spec(spec)] * spec.dense_layers + [spec] * (spec.layers - spec.dense_layers)


def stack_of(
    block: Callable[..., nnx.Module], spec: ModelSpec, rngs: nnx.Rngs, count: int, order_L: tuple[int, ...] | None
) -> Any:
    """Blocks, stacked.

    Arguments:
        block: makes one from `(spec, rngs=...)`.
        spec: what it is given.
        rngs: the stream `params` gives the initial parameters.
        count: how many there are.
        order_L: which layer each place of the stack holds; None: in order.
    """
    keys_L = jax.random.split(rngs.params(), count)
    if order_L is not None:
        keys_L = keys_L[jnp.array(order_L)]  # the keys and not what they make: that may be large

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: jax.Array) -> nnx.Module:
        return block(spec, rngs=nnx.Rngs(params=key))

    return make(keys_L)


def unstack(tree: Any) -> list[Any]:
    """Each layer's part of arrays with a leading axis of layers."""
    # jnp.unstack's gradient is one concatenation; that of x[i] adds `count` arrays of the full size.
    leaves, structure = jax.tree.flatten(tree)
    columns = [jnp.unstack(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, list(layer)) for layer in zip(*columns, strict=True)]
