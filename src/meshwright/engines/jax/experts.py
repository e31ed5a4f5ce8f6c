"""Expert parallelism: each device holds some of the experts, and tokens travel to them (GShard, Lepikhin et al., 2020).

Shapes: as in `meshwright.models.moe`; X shares along the mesh axis `tensor`.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.engines.jax.manual import manual
from meshwright.models.moe import ExpertKernels, move_rows, pairs, slots, through_experts, weighed_sum, whole_experts

_BATCH, _TIME, _INNER = ("data", "fsdp", "expert"), ("context",), ("tensor",)


def expert_parallel(x_BTD: jax.Array, chosen_BTJ: jax.Array, gates_BTJ: jax.Array, kernels: ExpertKernels) -> jax.Array:
    """The same as `whole_experts`, on the mesh set by `jax.set_mesh`: no token is dropped, whatever the router chooses.

    The batch is cut along the mesh axes `data`, `fsdp` and `expert`, time along `context`; the kernels' experts along
    `expert`, their inner width along `tensor`. What a device sends to another has room for all of its tokens. Where a
    batch can't be cut along all axes, it isn't along the last ones; if `expert` is among those, kernels travel rather
    than tokens.

    Arguments:
        x_BTD, chosen_BTJ, gates_BTJ, kernels: as in `whole_experts`.

    Returns:
        `[B, T, D]`, of the type of `x_BTD`.
    """
    batch, time = _dividing(_BATCH, x_BTD.shape[0]), _dividing(_TIME, x_BTD.shape[1])
    inner = _dividing(_INNER, kernels.up_EDF.shape[2])
    axes = batch + time + inner
    if not axes:
        return whole_experts(x_BTD, chosen_BTJ, gates_BTJ, kernels)
    leaves, structure = jax.tree.flatten(kernels)
    expert = "expert" if "expert" in batch else None
    shares = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in inner)

    def local(*arguments: jax.Array) -> jax.Array:
        x_BTD, chosen_BTJ, gates_BTJ = (x[0] for x in arguments[:3])
        chosen_BTJ, kernels = chosen_BTJ.astype(jnp.int32), jax.tree.unflatten(structure, arguments[3:])
        if expert is None:
            return whole_experts(x_BTD, chosen_BTJ, gates_BTJ, kernels)[None]
        return weighed_sum(_abroad(pairs(x_BTD, chosen_BTJ), chosen_BTJ, kernels, expert), gates_BTJ)[None]

    tokens = PartitionSpec(inner or None, batch or None, time or None, None)
    inward, outward = PartitionSpec(expert, None, inner or None), PartitionSpec(expert, inner or None, None)
    mapped = manual(local, (tokens,) * 3 + (inward,) * len(kernels.inward) + (outward,), tokens, axes)
    # `manual` takes floating point alone; float32 holds every number of an expert exactly.
    of_tokens = (x_BTD, chosen_BTJ.astype(jnp.float32), gates_BTJ)
    # A copy for each share: what they make, and its gradients, is then summed once, and not for each block of rows.
    y_XBTD = mapped(*(jnp.broadcast_to(x, (shares, *x.shape)) for x in of_tokens), *leaves)
    return y_XBTD.sum(axis=0)


def _dividing(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    while size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _abroad(x_RD: jax.Array, chosen_BTJ: jax.Array, kernels: ExpertKernels, axis: str) -> jax.Array:
    expert_R, choices = chosen_BTJ.reshape(-1), chosen_BTJ.shape[-1]
    devices, here = jax.lax.axis_size(axis), kernels.up_EDF.shape[0]
    room = len(expert_R) // choices * min(choices, here)  # a token goes to an expert once
    source_S, target_R = slots(expert_R // here, jnp.arange(len(expert_R)), devices, room)
    expert_S = (expert_R % here).at[source_S].get(mode="fill", fill_value=here)

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)

    arrived_SD = exchange(move_rows(x_RD, source_S, target_R))
    y_SD = exchange(through_experts(arrived_SD, exchange(expert_S), kernels))
    return move_rows(y_SD, target_R, source_S)
