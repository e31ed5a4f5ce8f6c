"""Products of rows with the kernels of their experts, for NVIDIA's Hopper GPUs.

Rows lie in slots, in the order of their experts, and each expert's begin at a block of their own: a block of rows has
one expert, and a program of the kernels here makes a tile of one block, or of one expert, with no row left to chance.
Slots that hold no row hold zeros, which go through as zeros.

They are written in Pallas, like `meshwright.models.kernels`, for the same device and under the same reservations.

Shapes: R rows, S slots in B blocks, E experts, D width, F inner width of an expert; of a tile, M rows, N columns and
K that are summed over at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from meshwright.models import kernels as kernels_for_gpus
from meshwright.models.kernels import call, dot
from meshwright.models.layout import layout

if TYPE_CHECKING:
    from meshwright.models.moe import ExpertKernels

BLOCK = 128
"""Rows of a block."""


class Tile(NamedTuple):
    """What a program makes, `BLOCK` rows high, and how."""

    columns: int
    depth: int
    """How many are summed over at a time."""
    warps: int
    stages: int
    """How many steps' operands are on their way at a time."""

    def fitting(self, depth: int, width: int) -> "Tile":
        """What divides a product of that size, in powers of two."""
        return self._replace(columns=math.gcd(self.columns, width), depth=math.gcd(self.depth, depth))


TILE = Tile(256, 64, 8, 3)
"""The fastest for each of the products here on an H200."""

_ABREAST = 8  # blocks whose tiles are made at the same time, for what they read to be in the cache
_CAPABILITY = 9.0  # what the tiles are for: others have less shared memory, or other instructions
_TYPES = (jnp.bfloat16, jnp.float16)


def applies(x_RD: jax.Array, up_EDF: jax.Array) -> bool:
    """Whether the kernels here may be used for these rows and experts, on this device and in this layout.

    With so few rows that most of what is multiplied would be padding, they aren't worth it.
    """
    experts, width, inner = up_EDF.shape
    fits = width % BLOCK == 0 and inner % BLOCK == 0 and len(x_RD) >= experts * BLOCK
    return fits and x_RD.dtype in _TYPES and kernels_for_gpus.capability() == _CAPABILITY and layout().on_one_device()


class Places(NamedTuple):
    """Where the rows are."""

    source_S: jax.Array
    """Which row is in each slot; R: none."""
    target_R: jax.Array
    """Which slot each row is in; S: none."""
    first_E1: jax.Array
    """The first block of each expert, and the first after all of them."""
    expert_B: jax.Array
    """The expert of each block; E: none, for it is empty."""


def places(order_R: jax.Array, place_R: jax.Array, bounds: jax.Array, expert_R: jax.Array) -> Places:
    """Give each row a slot among those of its expert.

    Arguments:
        order_R: the rows in the order of their experts.
        place_R: the place of each in that order.
        bounds: `[E + 1]`; the places of expert `e` are those from `bounds[e]` to before `bounds[e + 1]`.
        expert_R: the expert of each row; E: none.
    """
    rows, experts = len(order_R), len(bounds) - 1
    blocks = -(-rows // BLOCK) + experts  # each expert's last may be of one row
    ends_E = jnp.cumsum(-(-jnp.diff(bounds) // BLOCK))
    first_E1 = jnp.concatenate([jnp.zeros_like(ends_E[:1]), ends_E])
    expert_B = (jnp.arange(blocks)[:, None] >= ends_E).sum(axis=1)
    # What is added to a place to have its slot; rows of none are sent beyond all slots.
    shift_E1 = first_E1 * BLOCK - bounds
    target_R = jnp.where(expert_R < experts, place_R + shift_E1[expert_R], blocks * BLOCK)
    place_S = jnp.arange(blocks * BLOCK) - jnp.repeat(shift_E1[expert_B], BLOCK)
    inside_S = place_S < jnp.repeat(bounds[jnp.minimum(expert_B + 1, experts)], BLOCK)
    inside_S &= jnp.repeat(expert_B < experts, BLOCK)
    source_S = jnp.where(inside_S, order_R.at[place_S].get(mode="clip"), rows)
    return Places(source_S, target_R, first_E1.astype(jnp.int32), expert_B.astype(jnp.int32))


@jax.custom_vjp
def through_blocks(x_SD: jax.Array, first_E1: jax.Array, expert_B: jax.Array, kernels: "ExpertKernels") -> jax.Array:
    """Rows in their slots, each through its expert.

    Arguments:
        x_SD: the rows; zero in slots that hold none.
        first_E1, expert_B: as in `Places`.
        kernels: of all experts.

    Returns:
        `[S, D]`, of the type of `x_SD`.
    """
    return _forward(x_SD, first_E1, expert_B, kernels)[0]


def _forward(
    x_SD: jax.Array, first_E1: jax.Array, expert_B: jax.Array, kernels: "ExpertKernels"
) -> tuple[jax.Array, tuple]:
    fast = jax.tree.map(lambda kernel: kernel.astype(x_SD.dtype), kernels)
    products = [by_kernels(expert_B, [x_SD], [kernel_EDF]) for kernel_EDF in fast.inward]
    y_SD = by_kernels(expert_B, [_activated(kernels, *products)], [fast.down_EFD])
    return y_SD, (x_SD, first_E1, expert_B, kernels, [checkpoint_name(product, "product") for product in products])


def _backward(kept: tuple, dy_SD: jax.Array) -> tuple[jax.Array, None, None, "ExpertKernels"]:
    x_SD, first_E1, expert_B, kernels, products = kept
    # XLA would else keep what the forward pass made of the products, to save a pass over memory.
    products, dy_SD = jax.lax.optimization_barrier((products, dy_SD))
    fast = jax.tree.map(lambda kernel: kernel.astype(x_SD.dtype), kernels)
    inner_SF, pull = jax.vjp(partial(_activated, kernels), *products)
    d_products = pull(by_kernels(expert_B, [dy_SD], [fast.down_EFD], transposed=True))
    dx_SD = by_kernels(expert_B, d_products, fast.inward, transposed=True)
    d_inward = [over_rows(first_E1, x_SD, d_SF) for d_SF in d_products]
    d_gate = d_inward[0] if kernels.gate_EDF is not None else None
    d_kernels = replace(kernels, gate_EDF=d_gate, up_EDF=d_inward[-1], down_EFD=over_rows(first_E1, inner_SF, dy_SD))
    return dx_SD, None, None, jax.tree.map(lambda d, kernel: d.astype(kernel.dtype), d_kernels, kernels)


through_blocks.defvjp(_forward, _backward)


def _activated(kernels: "ExpertKernels", *products: jax.Array) -> jax.Array:
    # In float32, which costs nothing: reading and writing take longer.
    exact = (product.astype(jnp.float32) for product in products)
    return kernels.activated(*exact).astype(products[0].dtype)


def by_kernels(
    expert_B: jax.Array,
    rows: Sequence[jax.Array],
    kernels: Sequence[jax.Array],
    tile: Tile = TILE,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Rows, times the kernels of their experts.

    Arguments:
        expert_B: the expert of each block; E: none, and the products are zero.
        rows: `[S, I]`.
        kernels: what each of `rows` is multiplied by, `[E, I, O]`; the products are added up.
        tile: a program's.
        transposed: whether kernels are `[E, O, I]`.

    Returns:
        `[S, O]`, of the type of the rows.
    """
    (slots, depth), experts = rows[0].shape, kernels[0].shape[0]
    width = kernels[0].shape[1 if transposed else 2]
    tile = tile.fitting(depth, width)
    blocks, across = slots // BLOCK, width // tile.columns
    kernel = partial(
        _by_kernels,
        experts=experts,
        steps=depth // tile.depth,
        tile=tile,
        blocks=blocks,
        across=across,
        transposed=transposed,
    )
    shape = jax.ShapeDtypeStruct((slots, width), rows[0].dtype)
    return call(kernel, (blocks * across,), shape, expert_B, *rows, *kernels, warps=tile.warps, stages=tile.stages)


def _by_kernels(
    expert_ref: Any, *refs: Any, experts: int, steps: int, tile: Tile, blocks: int, across: int, transposed: bool
) -> None:
    *operands, y_ref = refs
    block, column = _abreast(pl.program_id(0), blocks, across)
    expert = expert_ref[block]
    high, wide = pl.ds(block * BLOCK, BLOCK), pl.ds(column * tile.columns, tile.columns)
    needed = steps * (1 - jax.lax.div(expert, experts))  # none in an empty block
    expert = jnp.minimum(expert, experts - 1)
    sums = jnp.zeros((BLOCK, tile.columns), jnp.float32)
    for x_ref, kernel_ref in zip(operands[: len(operands) // 2], operands[len(operands) // 2 :], strict=True):

        def one(step: jax.Array, sums: jax.Array, x_ref: Any = x_ref, kernel_ref: Any = kernel_ref) -> jax.Array:
            inner = pl.ds(step * tile.depth, tile.depth)
            where, over = ((expert, wide, inner), 1) if transposed else ((expert, inner, wide), 0)
            return sums + dot(x_ref[high, inner], kernel_ref[where], 1, over)

        sums = jax.lax.fori_loop(0, needed, one, sums)
    y_ref[high, wide] = sums.astype(y_ref.dtype)


def over_rows(first_E1: jax.Array, x_SI: jax.Array, y_SO: jax.Array, tile: Tile = TILE) -> jax.Array:
    """The sum over the rows of each expert of the outer products of two arrays; float32 `[E, I, O]`.

    Arguments:
        first_E1: as in `Places`.
        x_SI, y_SO: one of them must be zero where there is no row, the other finite.
        tile: a program's.
    """
    experts, height, width = len(first_E1) - 1, x_SI.shape[1], y_SO.shape[1]
    tile = tile.fitting(BLOCK, width)
    down, across = height // BLOCK, width // tile.columns
    kernel = partial(_over_rows, tile=tile, down=down, across=across)
    shape = jax.ShapeDtypeStruct((experts, height, width), jnp.float32)
    grid = (experts * down * across,)
    return call(kernel, grid, shape, first_E1, x_SI, y_SO, warps=tile.warps, stages=tile.stages)


def _over_rows(first_ref: Any, x_ref: Any, y_ref: Any, sums_ref: Any, *, tile: Tile, down: int, across: int) -> None:
    program = pl.program_id(0)
    expert = jax.lax.div(program, down * across)
    row, column = _abreast(jax.lax.rem(program, down * across), down, across)
    high, wide = pl.ds(row * BLOCK, BLOCK), pl.ds(column * tile.columns, tile.columns)

    def one(step: jax.Array, sums: jax.Array) -> jax.Array:
        rows = pl.ds(step * tile.depth, tile.depth)
        return sums + dot(x_ref[rows, high], y_ref[rows, wide], 0, 0)

    steps = BLOCK // tile.depth
    start = jnp.zeros((BLOCK, tile.columns), jnp.float32)
    sums_ref[expert, high, wide] = jax.lax.fori_loop(
        first_ref[expert] * steps, first_ref[expert + 1] * steps, one, start
    )


def _abreast(program: jax.Array, down: int, across: int) -> tuple[jax.Array, jax.Array]:
    # Down a few rows of tiles, then the next column of those.
    first = jax.lax.div(program, _ABREAST * across) * _ABREAST
    rest, high = jax.lax.rem(program, _ABREAST * across), jnp.minimum(down - first, _ABREAST)
    return first + jax.lax.rem(rest, high), jax.lax.div(rest, high)
