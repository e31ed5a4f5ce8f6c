"""A mixture of experts in place of the feed-forward part.

Shapes: B batch, T time, D width, F inner width of an expert, E experts, J choices of a token, R pairs of a token and a
choice (R = B T J where all are at hand), C room of an expert in a sequence, S slots, M rows of a block.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshwright.models import grouped
from meshwright.models.attention import Places
from meshwright.models.gradients import gelu, linear, over_tokens
from meshwright.models.layout import layout
from meshwright.models.mlp import MLP
from meshwright.models.routing import Routing, route, top_k, what_it_did
from meshwright.models.spec import ModelSpec

__all__ = ["ExpertKernels", "MoE", "Routing", "route", "top_k"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertKernels:
    """The kernels of all experts, and the activation between them."""

    gate_EDF: jax.Array | None
    """For `swiglu`; else None."""
    up_EDF: jax.Array
    down_EFD: jax.Array
    activation: str = field(metadata={"static": True})
    """As in `ModelSpec`."""

    @property
    def inward(self) -> list[jax.Array]:
        """The kernels that the input is multiplied by, `[E, D, F]` each."""
        return [self.up_EDF] if self.gate_EDF is None else [self.gate_EDF, self.up_EDF]

    def activated(self, *products: jax.Array) -> jax.Array:
        """What goes into the last product, given what came out of those with `inward`."""
        if self.activation == "swiglu":
            return jax.nn.silu(products[0]) * products[1]
        return (jax.nn.relu if self.activation == "relu" else gelu)(products[0])


class MoE(nnx.Module):
    """Experts of which each token passes those that a router scores highest (Shazeer et al., 2017).

    The weights of a token's experts are the shares of a softmax over all experts (Switch transformer, Fedus et al.,
    2021; Mixtral, Jiang et al., 2024) or a sigmoid of each score (DeepSeek-V3, 2024). They may come from the best
    groups of experts alone (DeepSeek-V2, 2024), and be chosen by scores that a bias corrects (DeepSeek-V3).

    Without a capacity factor no token is ever dropped, and what a token gets depends on the token alone. With one, each
    expert has a room in each sequence (GShard, Lepikhin et al., 2020), filled in the order of the sequence: a token may
    be dropped because of earlier tokens, but never because of later ones or of other sequences. In generation
    nothing is dropped.

    Arguments:
        spec: the architecture; `experts` must be set.
        std, out_std: standard deviations of the normal distributions from which the router and the inward kernels, and
            the outward kernels start.
        rngs: the stream `params` gives the initial parameters.
    """

    def __init__(self, spec: ModelSpec, *, std: float, out_std: float, rngs: nnx.Rngs):
        def kernel(std: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape), axes=axes)

        inward = (spec.experts, spec.width, spec.ffn_width), ("experts", "width", "ffn")
        outward = (spec.experts, spec.ffn_width, spec.width), ("experts", "ffn", "width")
        self.router = kernel(std, (spec.width, spec.experts), ("width", None))
        self.router_bias = nnx.Param(jnp.zeros(spec.experts), axes=(None,)) if spec.router_bias else None
        self.gate = kernel(std, *inward) if spec.activation == "swiglu" else None
        self.up = kernel(std, *inward)
        self.down = kernel(out_std, *outward)
        shared_width = spec.shared_experts * spec.ffn_width
        self.shared = MLP(spec, shared_width, std=std, out_std=out_std, rngs=rngs) if shared_width else None
        self.spec = spec

    def __call__(self, x_BTD: jax.Array, places: Places, keep_all: bool = False) -> tuple[jax.Array, Routing]:
        """Send each token through its experts.

        Arguments:
            x_BTD: the normed residual stream.
            places: where its columns stand, and how much each counts in `Routing`. What a token gets doesn't depend on
                its weight.
            keep_all: whether to drop none: prompts of one call are padded to one length, so that their room would be
                another's.

        Returns:
            The output, `[B, T, D]`, and what the router did.
        """
        scores_BTE = jnp.einsum(
            "BTD,DE->BTE", x_BTD.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        bias_E = None if self.router_bias is None else self.router_bias[...]
        shares_BTE, chosen_BTJ, gates_BTJ = route(scores_BTE, self.spec, bias_E)
        gate_EDF = None if self.gate is None else self.gate[...]
        kernels = ExpertKernels(gate_EDF, self.up[...], self.down[...], self.spec.activation)
        if self.spec.capacity_factor and not keep_all:
            room = expert_room(self.spec, x_BTD.shape[1])
            y_BTD, kept_BTJ = experts_with_room(x_BTD, chosen_BTJ, gates_BTJ, kernels, places.order_T, room)
        else:
            y_BTD, kept_BTJ = layout().experts(x_BTD, chosen_BTJ, gates_BTJ, kernels), None
        y_BTD = layout().place(y_BTD, "batch", "time", None)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        weights_BT = jnp.ones(()) if places.weights_BT is None else places.weights_BT.astype(jnp.float32)
        weights_BT = jnp.broadcast_to(weights_BT, x_BTD.shape[:2])
        return y_BTD, what_it_did(scores_BTE, shares_BTE, chosen_BTJ, kept_BTJ, weights_BT, self.spec)


def whole_experts(x_BTD: jax.Array, chosen_BTJ: jax.Array, gates_BTJ: jax.Array, kernels: ExpertKernels) -> jax.Array:
    """Each token through all experts chosen for it, where all experts are at hand.

    Arguments:
        x_BTD: the input.
        chosen_BTJ: the experts of each token.
        gates_BTJ: their weights, float32.
        kernels: of all experts.

    Returns:
        The weighed sum over a token's experts, `[B, T, D]`, of the type of `x_BTD`.
    """
    y_RD = through_experts(pairs(x_BTD, chosen_BTJ), chosen_BTJ.reshape(-1), kernels)
    return weighed_sum(y_RD, gates_BTJ)


def pairs(x_BTD: jax.Array, chosen_BTJ: jax.Array) -> jax.Array:
    """Each token as often as it has choices, `[R, D]`."""
    return jnp.repeat(x_BTD.reshape(-1, x_BTD.shape[-1]), chosen_BTJ.shape[-1], axis=0)


def weighed_sum(y_RD: jax.Array, gates_BTJ: jax.Array) -> jax.Array:
    """The sum over each token's choices, weighed in float32: `[B, T, D]`, of the type of `y_RD`."""
    y_BTJD = checkpoint_name(y_RD, "product").reshape(*gates_BTJ.shape, -1)
    return (y_BTJD.astype(jnp.float32) * gates_BTJ[..., None]).sum(axis=2).astype(y_RD.dtype)


def through_experts(x_RD: jax.Array, expert_R: jax.Array, kernels: ExpertKernels) -> jax.Array:
    """Each row through its expert.

    Arguments:
        x_RD: the rows.
        expert_R: the expert of each; as many as there are experts: none, and the result is zero.
        kernels: of all experts.

    Returns:
        `[R, D]`, of the type of `x_RD`.
    """
    order_R, place_R, bounds = _sorted_by_expert(expert_R, jnp.arange(len(expert_R)), kernels.up_EDF.shape[0])
    if grouped.applies(x_RD, kernels.up_EDF):
        places = grouped.places(order_R, place_R, bounds, expert_R)
        x_SD = move_rows(x_RD, places.source_S, places.target_R)
        y_SD = grouped.through_blocks(x_SD, places.first_E1, places.expert_B, kernels)
        return move_rows(y_SD, places.target_R, places.source_S)
    y_RD = grouped_experts(move_rows(x_RD, order_R, place_R), bounds, kernels)
    return move_rows(y_RD, place_R, order_R)


def _sorted_by_expert(expert_R: jax.Array, rank_R: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    # By expert, and for each by rank, of which there are as many as rows: which row stands at each place, which place
    # each row has, and the E + 1 borders.
    rows = len(expert_R)
    # GPUs sort by one key much faster than by two.
    keys = (expert_R * rows + rank_R,) if (experts + 1) * rows < 2**31 else (expert_R, rank_R)
    *_, order_R = jax.lax.sort((*keys, jnp.arange(rows)), num_keys=len(keys))
    place_R = jnp.zeros(rows, jnp.int32).at[order_R].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    return order_R, place_R, (expert_R[:, None] < jnp.arange(experts + 1)).sum(axis=0)


@jax.custom_vjp
def move_rows(x_RD: jax.Array, source_S: jax.Array, target_R: jax.Array) -> jax.Array:
    """Rows at new places: forward and backward are gathers, which are fast, and add up nothing in an unknown order.

    Arguments:
        x_RD: the rows.
        source_S: which row to put at each place; R: none, which leaves zeros.
        target_R: where each row is put; S: nowhere. Must be the inverse of `source_S`.

    Returns:
        `[S, D]`.
    """
    return x_RD.at[source_S].get(mode="fill", fill_value=0)


move_rows.defvjp(
    lambda x_RD, source_S, target_R: (move_rows(x_RD, source_S, target_R), (source_S, target_R)),
    lambda kept, dy_SD: (move_rows(dy_SD, kept[1], kept[0]), None, None),
)


class _Block(NamedTuple):
    # Rows that pass one expert together; those not inside are another's.
    expert: jax.Array
    begin: jax.Array
    inside_M1: jax.Array

    def read(self, x_RD: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_RD, self.begin, len(self.inside_M1))

    def write(self, x_RD: jax.Array, new_MD: jax.Array) -> jax.Array:
        new_MD = jnp.where(self.inside_M1, new_MD, self.read(x_RD))
        return jax.lax.dynamic_update_slice_in_dim(x_RD, new_MD, self.begin, axis=0)


def _over_blocks(rows: int, bounds: jax.Array, one: Any, start: Any) -> Any:
    # Only as many blocks as there are rows for: on a mesh most of the room for rows is empty.
    experts = len(bounds) - 1
    # Large enough for fast products, and small enough that the last block of each expert wastes little.
    most = 64 if jax.default_backend() == "cpu" else 1024
    size = min(most, -(-rows // experts))
    last_E = jnp.cumsum(-(-jnp.diff(bounds) // size))

    def body(i: jax.Array, carried: Any) -> Any:
        expert = (i >= last_E).sum()
        first = jnp.where(expert > 0, last_E[expert - 1], 0)
        start = bounds[expert] + (i - first) * size
        begin = jnp.minimum(start, rows - size)
        row_M1 = begin + jnp.arange(size)[:, None]
        return one(_Block(expert, begin, (row_M1 >= start) & (row_M1 < bounds[expert + 1])), carried)

    return jax.lax.fori_loop(0, last_E[-1], body, start)


@jax.custom_vjp
def grouped_experts(x_RD: jax.Array, bounds: jax.Array, kernels: ExpertKernels) -> jax.Array:
    """Rows sorted by expert, each through its own: block by block of rows of one expert.

    `jax.lax.ragged_dot` does the same, but multiplies all rows by all experts' kernels on CPUs and on Nvidia's GPUs.

    Arguments:
        x_RD: the rows.
        bounds: `[E + 1]`; the rows of expert `e` are those from `bounds[e]` to before `bounds[e + 1]`.
        kernels: of all experts.

    Returns:
        `[R, D]`, of the type of `x_RD`; zero beyond the last expert's rows.
    """
    return _grouped_forward(x_RD, bounds, kernels)[0]


def _grouped_forward(x_RD: jax.Array, bounds: jax.Array, kernels: ExpertKernels) -> tuple[jax.Array, tuple]:
    fast = jax.tree.map(lambda kernel: kernel.astype(x_RD.dtype), kernels)

    def one(block: _Block, carried: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        y_RD, products = carried
        x_MD = block.read(x_RD)
        new = [x_MD @ kernel_EDF[block.expert] for kernel_EDF in fast.inward]
        y_MD = fast.activated(*new) @ fast.down_EFD[block.expert]
        return block.write(y_RD, y_MD), [block.write(*pair) for pair in zip(products, new, strict=True)]

    rows, inner = len(x_RD), kernels.up_EDF.shape[2]
    products = [jnp.zeros((rows, inner), x_RD.dtype) for _ in fast.inward]
    y_RD, products = _over_blocks(rows, bounds, one, (jnp.zeros_like(x_RD), products))
    return y_RD, (x_RD, bounds, kernels, [checkpoint_name(product, "product") for product in products])


def _grouped_backward(kept: tuple, dy_RD: jax.Array) -> tuple[jax.Array, None, ExpertKernels]:
    x_RD, bounds, kernels, products = kept
    fast = jax.tree.map(lambda kernel: kernel.astype(x_RD.dtype), kernels)

    def one(block: _Block, carried: tuple[jax.Array, ExpertKernels]) -> tuple[jax.Array, ExpertKernels]:
        dx_RD, sums = carried
        x_MD, dy_MD = block.read(x_RD), jnp.where(block.inside_M1, block.read(dy_RD), 0)
        inner_MF, pull = jax.vjp(fast.activated, *(block.read(product) for product in products))
        d_products = pull(dy_MD @ fast.down_EFD[block.expert].T)
        into = zip(d_products, fast.inward, strict=True)
        dx_MD = sum(d_MF @ kernel_EDF[block.expert].T for d_MF, kernel_EDF in into)
        d_inward = [over_tokens(x_MD, d_MF) for d_MF in d_products]
        d_gate = d_inward[0] if kernels.gate_EDF is not None else None
        new = ExpertKernels(d_gate, d_inward[-1], over_tokens(inner_MF, dy_MD), kernels.activation)
        return block.write(dx_RD, dx_MD), jax.tree.map(lambda s, d: s.at[block.expert].add(d), sums, new)

    sums = jax.tree.map(lambda kernel: jnp.zeros(kernel.shape, jnp.float32), kernels)
    dx_RD, sums = _over_blocks(len(x_RD), bounds, one, (jnp.zeros_like(x_RD), sums))
    return dx_RD, None, jax.tree.map(lambda s, kernel: s.astype(kernel.dtype), sums, kernels)


grouped_experts.defvjp(_grouped_forward, _grouped_backward)


def expert_room(spec: ModelSpec, time: int) -> int:
    """How many tokens of a sequence of that many an expert takes, under `capacity_factor`."""
    choices = min(spec.experts_per_token, spec.experts)
    return min(time, math.ceil(spec.capacity_factor * time * choices / spec.experts))


def slots(expert_R: jax.Array, rank_R: jax.Array, experts: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Give each pair a slot at its expert, as long as there is room.

    Arguments:
        expert_R: the expert of each pair.
        rank_R: who comes first.
        experts: how many there are.
        room: slots of each expert; S = experts * room.

    Returns:
        `source_S` and `target_R`, as in `move_rows`.
    """
    order_R, place_R, bounds = _sorted_by_expert(expert_R, rank_R, experts)
    nth_R = place_R - bounds[expert_R]
    target_R = jnp.where(nth_R < room, expert_R * room + nth_R, experts * room)
    place_ES = bounds[:-1, None] + jnp.arange(room)
    source_ES = order_R.at[place_ES].get(mode="fill", fill_value=len(expert_R))
    return jnp.where(place_ES < bounds[1:, None], source_ES, len(expert_R)).reshape(-1), target_R


def experts_with_room(
    x_BTD: jax.Array,
    chosen_BTJ: jax.Array,
    gates_BTJ: jax.Array,
    kernels: ExpertKernels,
    order_T: jax.Array,
    room: int,
) -> tuple[jax.Array, jax.Array]:
    """Each token through those of its experts that have room for it (GShard, Lepikhin et al., 2020).

    Tokens take their slots in the order of the sequence, each all of its own: GShard, which serves the first choices of
    all tokens first, would let a token lose an expert to a later token, which tells it of the future.

    Arguments:
        x_BTD, chosen_BTJ, gates_BTJ, kernels: as in `whole_experts`.
        order_T: the place of each column in the sequence.
        room: slots of an expert in each sequence.

    Returns:
        The weighed sum over the experts that had room, `[B, T, D]`; and which those are, `[B, T, J]`.
    """
    (batch, _, width), (choices, experts) = x_BTD.shape, (chosen_BTJ.shape[2], kernels.up_EDF.shape[0])
    place, by_sequence = layout().place, layout().by_sequence

    @jax.vmap
    def slots_of_sequence(expert_TJ: jax.Array, order_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank_TJ = order_T[:, None].astype(jnp.int32) * choices + jnp.arange(choices)
        return slots(expert_TJ.astype(jnp.int32).reshape(-1), rank_TJ.reshape(-1), experts, room)

    def to_slots(x_BTD: jax.Array, *routed: jax.Array) -> jax.Array:
        return jax.vmap(move_rows)(jnp.repeat(x_BTD, choices, axis=1), *slots_of_sequence(*routed))

    def from_slots(y_BSD: jax.Array, *routed: jax.Array) -> jax.Array:
        source_BS, target_BR = slots_of_sequence(*routed)
        return jax.vmap(move_rows)(y_BSD, target_BR, source_BS)

    def has_room(chosen_BTJ: jax.Array, order_BT: jax.Array) -> jax.Array:
        target_BR = slots_of_sequence(chosen_BTJ, order_BT)[1]
        return (target_BR < experts * room).astype(jnp.float32).reshape(chosen_BTJ.shape)

    # A sequence is routed whole. Integers go as float32, which holds them exactly.
    x_BTD, chosen_BTJ = place(x_BTD, "batch", None, None), place(chosen_BTJ, "batch", None, None)
    order_BT = jnp.broadcast_to(order_T, chosen_BTJ.shape[:2])
    routed = (chosen_BTJ.astype(jnp.float32), order_BT.astype(jnp.float32))
    x_BECD = by_sequence(to_slots, x_BTD, *routed).reshape(batch, experts, room, width)
    # Two wishes one after another, so that a mesh goes from the one to the other by exchanging parts.
    x_BECD = place(place(x_BECD, "batch", None, None, None), "batch_beside_experts", "experts", None, None)
    by_expert = jax.vmap(linear, in_axes=(1, 0), out_axes=1)
    products = [checkpoint_name(by_expert(x_BECD, kernel_EDF), "product") for kernel_EDF in kernels.inward]
    inner_BECF = place(kernels.activated(*products), "batch_beside_experts", "experts", None, "ffn")
    y_BECD = by_expert(inner_BECF, kernels.down_EFD)
    y_BECD = place(place(y_BECD, "batch_beside_experts", "experts", None, None), "batch", None, None, None)
    y_BRD = by_sequence(from_slots, y_BECD.reshape(batch, -1, width), *routed)
    return weighed_sum(y_BRD, gates_BTJ), by_sequence(has_room, *routed) > 0.5
