"""One token of each text through the layers, for NVIDIA GPUs: seven kernels a layer, which read each parameter once.

A step of generation takes as long as reading all parameters does, if little comes in between. So there are few kernels,
and a product is spread over many programs, so that the whole device reads at once: a program makes some columns, and
sums over some rows. What such parts add up to is left to the kernel that comes next; where that is an activation, a
program sums over all rows.

They are written in Pallas, like `meshwright.models.kernels`, for the same devices and under the same reservations.

Shapes: B texts, P parts, I and O widths of a product's input and output, D width, H heads, C head width. In kernels, R
texts with padding, N columns of a product.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl

from meshwright.models import kernels
from meshwright.models.attention import Attention, LayerCache, Places
from meshwright.models.kernels import call, dot, load
from meshwright.models.layers import LayerNorm, Linear, RMSNorm
from meshwright.models.layout import layout
from meshwright.models.mlp import MLP
from meshwright.models.one_token_attention import attend
from meshwright.models.spec import ModelSpec

if TYPE_CHECKING:
    from meshwright.models.decoder import Block

_TYPES, _PARTS = (jnp.bfloat16, jnp.float16), (Linear, LayerNorm, RMSNorm)
_MOST_TEXTS = 64
_MOST_POSITIONS = 2048  # of a cache: a key-value head's are gone through one after another
_WIDEST_HEAD = 128  # for which a card's processors have the memory
_COLUMNS, _DEPTH = 64, 64  # of a product, that a program makes, and rows that it sums over in one go
_PROGRAMS = 256  # the least that a product in parts should have: about two for each of a large card's processors
_WARPS, _STAGES = 4, 4


class Layer(NamedTuple):
    """A layer, and what it goes on from."""

    block: "Block"
    places: Places
    """Where the token of each text stands; this layer's window counts."""
    cache: LayerCache
    """Keys and values of earlier positions."""


def applies(layers: Sequence[Layer], x_BTD: jax.Array) -> bool:
    """Whether `through` may be called with these: a token each of a few texts, on one device, and blocks with a norm
    before each part and one feed-forward part, without adapters and without parts of a researcher's own."""
    few = x_BTD.shape[0] <= _MOST_TEXTS and x_BTD.shape[1] == 1 and x_BTD.dtype in _TYPES
    here = kernels.capability() >= kernels.LEAST_CAPABILITY and layout().on_one_device()
    return few and here and all(_suits(layer.block) and _is_short(layer.cache) for layer in layers)


def _suits(block: "Block") -> bool:
    from meshwright.models.decoder import Block

    if not (type(block) is Block and type(block.attention) is Attention and type(block.mlp) is MLP):
        return False
    spec: ModelSpec = block.spec
    if spec.norm_placement != "pre" or spec.qk_norm == "all" or spec.attention_softcap or not _fits(spec):
        return False
    parts = [part for of in (block, block.attention, block.mlp) for _, part in nnx.iter_children(of)]
    parts = [part for part in parts if part not in (block.attention, block.mlp)]
    return all(type(part) in _PARTS and getattr(part, "lora", None) is None for part in parts)


def _is_short(cache: LayerCache) -> bool:
    return cache.keys_BKSC.shape[2] <= _MOST_POSITIONS


def _fits(spec: ModelSpec) -> bool:
    """Whether programs have whole tiles of all that they work on."""
    summed = (spec.width, spec.heads * spec.head_width, spec.ffn_width)
    whole = all(width % _DEPTH == 0 for width in summed) and spec.kv_heads * spec.head_width % _COLUMNS == 0
    head = spec.head_width
    return whole and 2 * kernels.LEAST_TILE <= head <= _WIDEST_HEAD and head == pl.next_power_of_2(head)


def through(layers: Sequence[Layer], x_B1D: jax.Array) -> tuple[jax.Array, list[LayerCache]]:
    """One token of each text through layers to which this `applies`.

    Arguments:
        layers: in order.
        x_B1D: the residual stream.

    Returns:
        The residual stream, and each layer's cache with the token.
    """
    x_BD, caches = x_B1D[:, 0], []
    parts_PBD: Any = None
    for layer in layers:
        block: Any = layer.block
        attention, mlp = block.attention, block.mlp
        x_BD, y_BD = added(x_BD, parts_PBD, block.attention_norm)
        heads_PBI = products(y_BD, [attention.query, attention.key, attention.value])
        y_BHC, cache = attend(heads_PBI, layer.places, layer.cache, attention)
        parts_PBD = products(y_BHC.reshape(len(x_BD), -1), [attention.out])
        x_BD, y_BD = added(x_BD, parts_PBD, block.mlp_norm)
        parts_PBD = products(activated(y_BD, mlp), [mlp.down])
        caches.append(cache)
    return (x_BD + parts_PBD.sum(axis=0)).astype(x_BD.dtype)[:, None], caches


def added(x_BD: jax.Array, parts_PBD: jax.Array | None, norm: LayerNorm | RMSNorm) -> tuple[jax.Array, jax.Array]:
    """The sum of the residual stream and what comes to it in parts (None: nothing), and that normed."""
    shape = jax.ShapeDtypeStruct(x_BD.shape, x_BD.dtype)
    refs = _Sum(x_BD, parts_PBD, norm.scale[...], norm.bias[...] if isinstance(norm, LayerNorm) else None)
    return call(partial(_add, eps=norm.how.eps), x_BD.shape[:1], [shape, shape], refs, name="add")


class _Sum(NamedTuple):
    x_BD: Any
    parts_PBD: Any
    scale_D: Any
    bias_D: Any
    """None: the mean isn't taken off, either."""


def _add(refs: _Sum, x_ref: Any, y_ref: Any, *, eps: float) -> None:
    text, width = pl.program_id(0), x_ref.shape[1]
    columns = pl.next_power_of_2(width)
    wide, inside_D = pl.ds(0, columns), jnp.arange(columns) < width
    x_D = load(refs.x_BD.at[text, wide], inside_D).astype(jnp.float32)
    if refs.parts_PBD is not None:
        parts = pl.ds(0, refs.parts_PBD.shape[0])
        x_D = x_D + load(refs.parts_PBD.at[parts, text, wide], inside_D[None]).sum(axis=0)
        x_D = x_D.astype(x_ref.dtype).astype(jnp.float32)
    centred_D = x_D if refs.bias_D is None else jnp.where(inside_D, x_D - x_D.sum(axis=0) / width, 0.0)
    inverse = jax.lax.rsqrt((centred_D * centred_D).sum(axis=0) / width + eps)
    y_D = centred_D * inverse * load(refs.scale_D.at[wide], inside_D)
    y_D = y_D if refs.bias_D is None else y_D + load(refs.bias_D.at[wide], inside_D)
    kernels.triton.store(x_ref.at[text, wide], x_D.astype(x_ref.dtype), mask=inside_D)
    kernels.triton.store(y_ref.at[text, wide], y_D.astype(y_ref.dtype), mask=inside_D)


def products(x_BI: jax.Array, linears: Sequence[Linear]) -> jax.Array:
    """Linear maps of one input, in parts that are yet to be added up: each of some rows of their kernels.

    Arguments:
        x_BI: the input.
        linears: the maps, all with a bias or all without.

    Returns:
        `[P, B, O]` float32, the outputs side by side.
    """
    width = sum(linear.kernel.shape[1] for linear in linears)
    parts = _parts(width // _COLUMNS, x_BI.shape[1])
    return _spread(x_BI, linears, jax.ShapeDtypeStruct((parts, len(x_BI), width), jnp.float32))


def activated(x_BD: jax.Array, mlp: MLP) -> jax.Array:
    """What goes into the last map of a feed-forward part, `[B, F]`."""
    linears: Any = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    shape = jax.ShapeDtypeStruct((1, len(x_BD), mlp.up.kernel.shape[1]), x_BD.dtype)
    return _spread(x_BD, linears, shape, mlp.activation)[0]


def _parts(across: int, depth: int) -> int:
    """How many programs share the rows of a column."""
    parts = 1
    while parts * across < _PROGRAMS and depth % (2 * parts * _DEPTH) == 0:
        parts *= 2
    return parts


class _Operands(NamedTuple):
    x_BI: Any
    kernels_IO: list[Any]
    biases_O: list[Any]


def _spread(
    x_BI: jax.Array, linears: Sequence[Linear], shape: jax.ShapeDtypeStruct, activation: str | None = None
) -> jax.Array:
    parts, texts, width = shape.shape
    operands = _Operands(
        x_BI,
        [linear.kernel[...].astype(x_BI.dtype) for linear in linears],
        [linear.bias[...] for linear in linears if linear.bias is not None],
    )
    kernel = partial(_products, texts=texts, parts=parts, activation=activation)
    name = f"{activation or 'products'}_{x_BI.shape[1]}_{width}"
    return call(kernel, (width // _COLUMNS, parts), shape, operands, name=name, warps=_WARPS, stages=_STAGES)


def _products(refs: _Operands, y_ref: Any, *, texts: int, parts: int, activation: str | None) -> None:
    column, part = pl.program_id(0) * _COLUMNS, pl.program_id(1)
    rows = max(kernels.LEAST_TILE, pl.next_power_of_2(texts))
    inside_R1 = jnp.arange(rows)[:, None] < texts

    def write(y_RN: jax.Array) -> None:
        here = y_ref.at[part, pl.ds(0, rows), pl.ds(column, _COLUMNS)]
        kernels.triton.store(here, y_RN.astype(y_ref.dtype), mask=jnp.broadcast_to(inside_R1, y_RN.shape))

    summed = partial(_summed, refs, rows=rows, inside_R1=inside_R1, part=part, parts=parts)
    if activation is not None:
        first_RN, *second_RN = summed(range(len(refs.kernels_IO)), column)
        write(math.prod(second_RN, start=_ACTIVATIONS[activation](first_RN)))
        return
    first = 0
    for index, kernel in enumerate(refs.kernels_IO):  # side by side: a program works on one of them

        def of_this(index: int = index, first: int = first) -> None:
            write(summed([index], column - first)[0])

        end = first + kernel.shape[1]
        pl.when((column >= first) & (column < end))(of_this)
        first = end


def _gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(2.0 * kernels.GELU_SCALE * (x + kernels.GELU_CUBIC * x * x * x))


_ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": _gelu, "gelu": _gelu, "relu": jax.nn.relu}


def _summed(
    refs: _Operands,
    indices: Sequence[int],
    column: jax.Array,
    *,
    rows: int,
    inside_R1: jax.Array,
    part: jax.Array,
    parts: int,
) -> list[jax.Array]:
    """What a program makes of some maps from a column on, float32 `[R, N]` each."""
    wide, steps = pl.ds(column, _COLUMNS), refs.x_BI.shape[1] // _DEPTH // parts

    def one(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        inner = pl.ds((part * steps + step) * _DEPTH, _DEPTH)
        x = load(refs.x_BI.at[pl.ds(0, rows), inner], inside_R1)
        return [y + dot(x, refs.kernels_IO[index][inner, wide], 1, 0) for y, index in zip(sums, indices, strict=True)]

    sums = jax.lax.fori_loop(0, steps, one, [jnp.zeros((rows, _COLUMNS), jnp.float32) for _ in indices])
    if not refs.biases_O:
        return sums
    share = jnp.maximum(1 - part, 0).astype(jnp.float32)  # the first part has the biases
    biases = [share * refs.biases_O[index][wide].astype(jnp.float32) for index in indices]
    return [y + bias[None] for y, bias in zip(sums, biases, strict=True)]
