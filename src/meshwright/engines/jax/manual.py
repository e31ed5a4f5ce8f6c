"""`shard_map` that may stand inside another one.

JAX can't yet differentiate a `shard_map` inside a `shard_map` over other axes: what the forward pass keeps for the
backward one would have to lie on both. Here the two passes are two maps, and what is kept is handed over with a
leading axis of devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def manual(
    f: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_specs: Any, axes: tuple[str, ...]
) -> Callable[..., Any]:
    """Map `f` over shards along some mesh axes, differentiably; the other axes stay automatic.

    Arguments:
        f: works on one shard of each argument, all arrays of floating point; may use collectives over `axes` whose
            transpose is a collective (`ppermute`, `all_to_all`, `all_gather`, `psum_scatter`), but not `psum`.
        in_specs: how each argument is cut, over `axes` only; an argument is the same along axes not named.
        out_specs: the same for what `f` returns; it must name every one of `axes`.
        axes: the mesh axes, of the mesh set by `jax.set_mesh`.
    """
    leading = PartitionSpec(axes)
    structure = None

    def shards(g: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(g, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)

    @jax.custom_vjp
    def mapped(*arguments: jax.Array) -> Any:
        return shards(f, in_specs, out_specs)(*arguments)

    def forward(*arguments: jax.Array) -> tuple[Any, list[jax.Array]]:
        def local(*arguments: jax.Array) -> tuple[Any, list[jax.Array]]:
            nonlocal structure
            y, back = jax.vjp(f, *arguments)
            kept, structure = jax.tree.flatten(back)
            return y, [leaf[None] for leaf in kept]

        return shards(local, in_specs, (out_specs, leading))(*arguments)

    def backward(kept: list[jax.Array], dy: Any) -> tuple[jax.Array, ...]:
        def local(kept: list[jax.Array], dy: Any) -> tuple[jax.Array, ...]:
            gradients = jax.tree.unflatten(structure, [leaf[0] for leaf in kept])(dy)
            return tuple(_summed(g, spec, axes) for g, spec in zip(gradients, in_specs, strict=True))

        return shards(local, (leading, out_specs), in_specs)(kept, dy)

    mapped.defvjp(forward, backward)
    return mapped


def _summed(gradient: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    # Each shard has used an argument that isn't cut along an axis: their gradients add up.
    named = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    same = tuple(axis for axis in axes if axis not in named)
    if not same:
        return gradient
    return jax.lax.psum(gradient.astype(jnp.float32), same).astype(
        gradient.dtype
    )  # XLA's CPU backend can't in bfloat16
