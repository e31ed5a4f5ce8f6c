"""Kernels for NVIDIA GPUs, in Pallas, where XLA goes through memory more often than it need.

Each takes rows, reads them once and writes its result; sums over rows leave it as one part for each program, which XLA
adds up, so nothing depends on the order in which programs run. XLA can't cut what isn't its own, so on a mesh each
device runs them on its examples, and where those aren't whole, or JAX has no Triton any more, the formulas that they
stand for serve (`applies`).

Shapes: N rows (tokens), D or F their width, V scores of a token, P parts.
"""

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshwright.models.layout import layout

try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX has announced that it will go
    triton = None  # type: ignore[assignment]

GELU_SCALE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
"""Of the tanh form of GELU (Hendrycks and Gimpel, 2016)."""

LEAST_CAPABILITY = 8.0
"""XLA refuses to compile Triton's kernels for older cards."""
LEAST_TILE = 16
"""The fewest rows and columns of a product on tensor cores."""

_ELEMENTS, _WARPS = 2048, 4  # of a block, and what works on it: 16 elements a thread
_WIDEST = 16_384
_ROWS_OF_A_PROGRAM = 32
_SCORES, _SCORES_WARPS = 4096, 8


def applies(x: jax.Array) -> bool:
    """Whether the kernels here may be used for rows like these: `[B, ..., D]`, on this device and in this layout."""
    return capability() >= LEAST_CAPABILITY and x.shape[-1] <= _WIDEST and layout().rows_are_whole(x.shape[0])


def capability() -> float:
    """The compute capability of the devices here, if kernels can be compiled for them; else 0."""
    return 0.0 if triton is None else compute_capability()


@cache
def compute_capability() -> float:
    """The compute capability of the devices here; 0: they have none."""
    if jax.default_backend() != "gpu":
        return 0.0
    try:
        return float(jax.local_devices()[0].compute_capability)
    except ValueError:  # AMD's have names
        return 0.0


def norm_backward(
    x: jax.Array, dy: jax.Array, scale_D: jax.Array, eps: float, *, centred: bool, beside: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of a norm over the last axis.

    Arguments:
        x, dy: what went in, `[..., D]`, and the gradient of what came out.
        scale_D: what the normed values are multiplied by.
        eps: added to the mean square.
        centred: whether the mean is taken off first (LayerNorm), or not (RMSNorm).
        beside: a gradient of `x` from elsewhere, which is added.

    Returns:
        The gradients of `x`, of its type, and of the scale and the bias, `[D]` float32.
    """
    local = partial(_norm_backward_here, eps=eps, centred=centred)
    rows = (x, dy) if beside is None else (x, dy, beside)
    dx, scales_PD, biases_PD = layout().by_rows(local, rows, (scale_D,))
    return dx, scales_PD.sum(axis=0), biases_PD.sum(axis=0)


def _norm_backward_here(x: jax.Array, *more: jax.Array, eps: float, centred: bool) -> list[jax.Array]:
    *others, scale_D = more
    width = x.shape[-1]
    rows, columns = x.size // width, pl.next_power_of_2(width)
    share = _dividing(rows, _ROWS_OF_A_PROGRAM)
    block = min(share, max(1, _ELEMENTS // columns))
    part = jax.ShapeDtypeStruct((rows // share, width), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((rows, width), x.dtype), part, part]
    kernel = partial(_norm_backward, share=share, block=block, columns=columns, width=width, eps=eps, centred=centred)
    given = (of_rows.reshape(rows, width) for of_rows in (x, *others))
    dx, *parts = call(kernel, (rows // share,), shapes, scale_D, *given)
    return [dx.reshape(x.shape), *parts]


def _norm_backward(
    scale_ref: Any,
    x_ref: Any,
    dy_ref: Any,
    *refs: Any,
    share: int,
    block: int,
    columns: int,
    width: int,
    eps: float,
    centred: bool,
) -> None:
    *beside_ref, dx_ref, d_scale_ref, d_bias_ref = refs
    program = pl.program_id(0)
    inside_C = jnp.arange(columns) < width
    inside = jnp.broadcast_to(inside_C[None], (block, columns))
    scale_C = triton.load(scale_ref.at[pl.ds(0, columns)], mask=inside_C, other=0.0).astype(jnp.float32)

    def one(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        here = pl.ds(program * share + index * block, block), pl.ds(0, columns)
        x, dy, *beside = (
            triton.load(ref.at[here], mask=inside, other=0.0).astype(jnp.float32)
            for ref in (x_ref, dy_ref, *beside_ref)
        )
        if centred:
            x = jnp.where(inside, x - x.sum(axis=1)[:, None] / width, 0.0)
        inverse = jax.lax.rsqrt((x * x).sum(axis=1) / width + eps)[:, None]
        normed, dn = x * inverse, dy * scale_C[None]
        dx = dn - normed * ((dn * normed).sum(axis=1)[:, None] / width)
        if centred:
            dx = dx - dn.sum(axis=1)[:, None] / width
        dx = inverse * dx + (beside[0] if beside else 0.0)
        triton.store(dx_ref.at[here], dx.astype(dx_ref.dtype), mask=inside)
        return sums[0] + dy * normed, sums[1] + dy

    zeros = jnp.zeros((block, columns), jnp.float32)
    d_scale, d_bias = jax.lax.fori_loop(0, share // block, one, (zeros, zeros))
    for ref, total in ((d_scale_ref, d_scale), (d_bias_ref, d_bias)):
        triton.store(ref.at[program, pl.ds(0, columns)], total.sum(axis=0), mask=inside_C)


def gelu_backward(x: jax.Array, bias_F: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of `gelu(x + bias)`, the tanh form.

    Arguments:
        x, dy: what went in, `[..., F]`, and the gradient of what came out.
        bias_F: the bias.

    Returns:
        The gradients of `x`, of its type, and of the bias, `[F]` float32.
    """
    dx, biases_PF = layout().by_rows(_gelu_backward_here, (x, dy), (bias_F,))
    return dx, biases_PF.sum(axis=0)


def _gelu_backward_here(x: jax.Array, dy: jax.Array, bias_F: jax.Array) -> list[jax.Array]:
    width = x.shape[-1]
    rows, columns = x.size // width, min(_ELEMENTS // 2, pl.next_power_of_2(width))
    share = _dividing(rows, _ROWS_OF_A_PROGRAM)
    part = jax.ShapeDtypeStruct((rows // share, width), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((rows, width), x.dtype), part]
    block = min(share, _ELEMENTS // columns)
    kernel = partial(_gelu_backward, share=share, block=block, columns=columns, width=width)
    given = (of_rows.reshape(rows, width) for of_rows in (x, dy))
    dx, biases_PF = call(kernel, (rows // share, -(-width // columns)), shapes, bias_F, *given)
    return [dx.reshape(x.shape), biases_PF]


def _gelu_backward(
    bias_ref: Any,
    x_ref: Any,
    dy_ref: Any,
    dx_ref: Any,
    d_bias_ref: Any,
    *,
    share: int,
    block: int,
    columns: int,
    width: int,
) -> None:
    program, first = pl.program_id(0), pl.program_id(1) * columns
    inside_C = first + jnp.arange(columns) < width
    inside = jnp.broadcast_to(inside_C[None], (block, columns))
    bias_C = triton.load(bias_ref.at[pl.ds(first, columns)], mask=inside_C, other=0.0).astype(jnp.float32)

    def one(index: jax.Array, sums: jax.Array) -> jax.Array:
        here = pl.ds(program * share + index * block, block), pl.ds(first, columns)
        x, dy = (triton.load(ref.at[here], mask=inside, other=0.0).astype(jnp.float32) for ref in (x_ref, dy_ref))
        x = x + bias_C[None]
        inner = GELU_SCALE * (x + GELU_CUBIC * x * x * x)
        tanh = 1.0 - 2.0 / (jnp.exp(2.0 * inner) + 1.0)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
        triton.store(dx_ref.at[here], (dy * slope).astype(dx_ref.dtype), mask=inside)
        return sums + dy * slope

    total = jax.lax.fori_loop(0, share // block, one, jnp.zeros((block, columns), jnp.float32))
    triton.store(d_bias_ref.at[program, pl.ds(first, columns)], total.sum(axis=0), mask=inside_C)


def cross_entropy(
    scores_NV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, *, vocab: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropies and their gradients by the scores, which are read twice.

    Arguments:
        scores_NV: float32.
        targets_N: the token that came.
        weights_N: what each token's gradient is multiplied by.
        vocab: scores from here on are padding.
        dtype: of the gradients.

    Returns:
        The cross-entropies, `[N]` float32, not weighed, and the weighed gradients, `[N, V]`; zero for padding.
    """
    (rows, width), columns = scores_NV.shape, _SCORES
    shapes = [jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows, width), dtype)]
    kernel = partial(_cross_entropy, columns=columns, width=width, vocab=vocab)
    targets_N, weights_N = targets_N.astype(jnp.int32), weights_N.astype(jnp.float32)
    losses_N, d_scores_NV = call(kernel, (rows,), shapes, scores_NV, targets_N, weights_N, warps=_SCORES_WARPS)
    return losses_N, d_scores_NV


def _cross_entropy(
    scores_ref: Any,
    targets_ref: Any,
    weights_ref: Any,
    losses_ref: Any,
    d_scores_ref: Any,
    *,
    columns: int,
    width: int,
    vocab: int,
) -> None:
    row = pl.program_id(0)
    target, weight = targets_ref[row], weights_ref[row]
    lowest = float(jnp.finfo(jnp.float32).min)

    def scores(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        column_C = index * columns + jnp.arange(columns)
        here = scores_ref.at[row, pl.ds(index * columns, columns)]
        return column_C, triton.load(here, mask=column_C < vocab, other=lowest)

    def include(index: jax.Array, met: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        highest, sums_C = met
        _, scores_C = scores(index)
        higher = jnp.maximum(highest, scores_C.max(axis=0))
        return higher, sums_C * jnp.exp(highest - higher) + jnp.exp(scores_C - higher)

    blocks = -(-width // columns)
    start = jnp.float32(lowest), jnp.zeros(columns, jnp.float32)
    highest, sums_C = jax.lax.fori_loop(0, blocks, include, start)
    log_sum = highest + jnp.log(sums_C.sum(axis=0))

    def write(index: jax.Array, score: jax.Array) -> jax.Array:
        column_C, scores_C = scores(index)
        hit_C = column_C == target
        d_scores_C = weight * (jnp.exp(scores_C - log_sum) - jnp.where(hit_C, 1.0, 0.0))
        here = d_scores_ref.at[row, pl.ds(index * columns, columns)]
        triton.store(here, d_scores_C.astype(d_scores_ref.dtype), mask=column_C < width)
        return score + jnp.where(hit_C, scores_C, 0.0).sum(axis=0)

    losses_ref[row] = log_sum - jax.lax.fori_loop(0, blocks, write, jnp.float32(0.0))


def call(
    kernel: Any,
    grid: tuple[int, ...],
    shapes: Any,
    *arrays: Any,
    warps: int = _WARPS,
    stages: int | None = None,
    written: dict[int, int] | None = None,
    name: str | None = None,
) -> Any:
    """Run a kernel; in JAX's interpreter where there is no GPU, for tests.

    Arguments:
        kernel: it gets references to the arrays, and to what it makes.
        grid: how many programs there are.
        shapes: of what it makes.
        arrays: what it reads; trees of arrays will do.
        warps: of a program.
        stages: of how many rounds of a loop the reads are under way at a time.
        written: of the arrays' leaves that it writes to, by number, which of `shapes` each becomes.
        name: what a profile calls it.
    """
    interpret = jax.default_backend() != "gpu"
    parameters = None if interpret else triton.CompilerParams(num_warps=warps, num_stages=stages)
    options: dict[str, Any] = {"interpret": interpret, "compiler_params": parameters, "name": name}
    return pl.pallas_call(kernel, shapes, grid=grid, input_output_aliases=written or {}, **options)(*arrays)


def load(ref: Any, inside: jax.Array | None = None) -> jax.Array:
    """Within a kernel: what is in an array, and zero where not inside, a mask that is broadcast."""
    if inside is None:
        return triton.load(ref)
    return triton.load(ref, mask=jnp.broadcast_to(inside, ref.shape), other=0.0)


def dot(x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
    """Within a kernel: a product, float32, summed over an axis of each."""
    return jax.lax.dot_general(x, y, (((over_x,), (over_y,)), ((), ())), preferred_element_type=jnp.float32)


def _dividing(number: int, most: int) -> int:
    """The largest power of two that divides a number, and at most `most`, itself one."""
    return min(number & -number, most)
