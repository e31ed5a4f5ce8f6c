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

_WARPS = 4
_WIDEST = 16_384
_ROWS_OF_A_PROGRAM = 32
_NORM_ELEMENTS = 1024  # of a warp
_NORM_WARPS = 1024  # of all programs together: fewer don't keep the card's memory at work
_GELU_COLUMNS, _GELU_WARPS, _GELU_ROWS = 512, 2, 8
_GELU_BACKWARD_COLUMNS, _GELU_BACKWARD_WARPS = 256, 1
_SCORES, _SCORES_WARPS = 4096, 16


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
    share, block, warps = _norm_blocks(rows, columns)
    part = jax.ShapeDtypeStruct((rows // share, width), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((rows, width), x.dtype), part, part]
    kernel = partial(_norm_backward, share=share, block=block, columns=columns, width=width, eps=eps, centred=centred)
    given = (of_rows.reshape(rows, width) for of_rows in (x, *others))
    dx, *parts = call(kernel, (rows // share,), shapes, scale_D, *given, warps=warps)
    return [dx.reshape(x.shape), *parts]


def _norm_blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """How many rows are a program's, how many of these it takes at a time, and how many warps it has."""
    at_once = max(1, _NORM_ELEMENTS // columns)
    if _NORM_ELEMENTS < columns <= 4 * _NORM_ELEMENTS:
        at_once = 2  # several warps wait for each other at each sum: for those of two rows, where registers hold them
    warps = at_once * columns // _NORM_ELEMENTS
    wanted = pl.next_power_of_2(max(_ROWS_OF_A_PROGRAM // 4, rows * warps // _NORM_WARPS))
    share = _dividing(rows, min(_ROWS_OF_A_PROGRAM, wanted))
    return share, min(share, at_once), warps


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
    scale_C = load(scale_ref.at[pl.ds(0, columns)], inside_C).astype(jnp.float32)

    def rows(index: jax.Array) -> Any:
        return pl.ds(program * share + index * block, block), pl.ds(0, columns)

    def read(index: jax.Array) -> list[jax.Array]:
        return [load(ref.at[rows(index)], inside) for ref in (x_ref, dy_ref, *beside_ref)]

    def work(index: jax.Array, given: list[jax.Array], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, dy, *beside = (part.astype(jnp.float32) for part in given)
        if centred:
            x = jnp.where(inside, x - x.sum(axis=1)[:, None] / width, 0.0)
        inverse = jax.lax.rsqrt((x * x).sum(axis=1) / width + eps)[:, None]
        normed, dn = x * inverse, dy * scale_C[None]
        dx = dn - normed * ((dn * normed).sum(axis=1)[:, None] / width)
        if centred:
            dx = dx - dn.sum(axis=1)[:, None] / width
        dx = inverse * dx + (beside[0] if beside else 0.0)
        triton.store(dx_ref.at[rows(index)], dx.astype(dx_ref.dtype), mask=inside)
        return sums[0] + dy * normed, sums[1] + dy

    zeros = jnp.zeros((block, columns), jnp.float32)
    d_scale, d_bias = _in_rounds(share // block, read, work, (zeros, zeros))
    for ref, total in ((d_scale_ref, d_scale), (d_bias_ref, d_bias)):
        triton.store(ref.at[program, pl.ds(0, columns)], total.sum(axis=0), mask=inside_C)


def gelu(x: jax.Array, bias_F: jax.Array) -> jax.Array:
    """`gelu(x + bias)`, the tanh form, of the type and shape of `x`, `[..., F]`."""
    return layout().by_rows(_gelu_here, (x,), (bias_F,))


def _gelu_here(x: jax.Array, bias_F: jax.Array) -> jax.Array:
    width = x.shape[-1]
    rows, columns = x.size // width, min(_GELU_COLUMNS, pl.next_power_of_2(width))
    share = _dividing(rows, _GELU_ROWS)
    grid, shape = (rows // share, -(-width // columns)), jax.ShapeDtypeStruct((rows, width), x.dtype)
    kernel = partial(_gelu, share=share, columns=columns)
    return call(kernel, grid, shape, bias_F, x.reshape(rows, width), warps=_GELU_WARPS).reshape(x.shape)


def _gelu(bias_ref: Any, x_ref: Any, y_ref: Any, *, share: int, columns: int) -> None:
    program, first = pl.program_id(0), pl.program_id(1) * columns
    here = pl.ds(first, columns)
    inside_C = first + jnp.arange(columns) < x_ref.shape[1]
    bias_C = load(bias_ref.at[here], inside_C).astype(jnp.float32)

    def read(index: jax.Array) -> jax.Array:
        return load(x_ref.at[program * share + index, here], inside_C)

    def work(index: jax.Array, x_C: jax.Array, _: None) -> None:
        x_C = x_C.astype(jnp.float32) + bias_C
        y_C = (x_C * _sigmoid_of_gelu(x_C)).astype(y_ref.dtype)
        triton.store(y_ref.at[program * share + index, here], y_C, mask=inside_C)

    _in_rounds(share, read, work, None)


def _sigmoid_of_gelu(x: jax.Array) -> jax.Array:
    """What `x` is multiplied by: (1 + tanh(a)) / 2 = sigmoid(2 a), in a power of two, which a GPU has."""
    return 1.0 / (1.0 + jnp.exp2(x * (-2.0 * GELU_SCALE / math.log(2.0)) * (1.0 + GELU_CUBIC * x * x)))


def gelu_backward(x: jax.Array, bias_F: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of `gelu(x, bias)`.

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
    rows, columns = x.size // width, min(_GELU_BACKWARD_COLUMNS, pl.next_power_of_2(width))
    share = _dividing(rows, _ROWS_OF_A_PROGRAM)
    part = jax.ShapeDtypeStruct((rows // share, width), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((rows, width), x.dtype), part]
    kernel = partial(_gelu_backward, share=share, columns=columns)
    given = (of_rows.reshape(rows, width) for of_rows in (x, dy))
    dx, biases_PF = call(
        kernel, (rows // share, -(-width // columns)), shapes, bias_F, *given, warps=_GELU_BACKWARD_WARPS
    )
    return [dx.reshape(x.shape), biases_PF]


def _gelu_backward(
    bias_ref: Any, x_ref: Any, dy_ref: Any, dx_ref: Any, d_bias_ref: Any, *, share: int, columns: int
) -> None:
    program, first = pl.program_id(0), pl.program_id(1) * columns
    here = pl.ds(first, columns)
    inside_C = first + jnp.arange(columns) < x_ref.shape[1]
    bias_C = load(bias_ref.at[here], inside_C).astype(jnp.float32)

    def read(index: jax.Array) -> list[jax.Array]:
        return [load(ref.at[program * share + index, here], inside_C) for ref in (x_ref, dy_ref)]

    def work(index: jax.Array, given: list[jax.Array], sum_C: jax.Array) -> jax.Array:
        x_C, dy_C = (part.astype(jnp.float32) for part in given)
        x_C = x_C + bias_C
        sigmoid_C = _sigmoid_of_gelu(x_C)
        inner_C = GELU_SCALE * (2.0 + 6.0 * GELU_CUBIC * x_C * x_C)  # the slope of what the sigmoid is of
        dx_C = dy_C * (sigmoid_C + x_C * sigmoid_C * (1.0 - sigmoid_C) * inner_C)
        triton.store(dx_ref.at[program * share + index, here], dx_C.astype(dx_ref.dtype), mask=inside_C)
        return sum_C + dx_C

    total_C = _in_rounds(share, read, work, jnp.zeros(columns, jnp.float32))
    triton.store(d_bias_ref.at[program, here], total_C, mask=inside_C)


def cross_entropy(
    scores_NV: jax.Array, targets_N: jax.Array, weights_N: jax.Array, *, vocab: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropies and their gradients by the scores, which are read twice.

    Arguments:
        scores_NV: of any type of floating point.
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
    row, blocks = pl.program_id(0), -(-width // columns)
    target, weight = jnp.clip(targets_ref[row], 0, vocab - 1), weights_ref[row]
    log2_e = 1.0 / math.log(2.0)
    lowest = float(max(jnp.finfo(scores_ref.dtype).min, jnp.finfo(jnp.float32).min / 2))  # twice that is finite, too

    def scores(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Their columns, and scores as powers of two, which a GPU has."""
        column_C = index * columns + jnp.arange(columns)
        here = scores_ref.at[row, pl.ds(index * columns, columns)]
        return column_C, triton.load(here, mask=column_C < vocab, other=lowest).astype(jnp.float32) * log2_e

    def include(index: jax.Array, met: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Softmax with a block more (Milakov and Gimelshein, 2018), of each place by itself, so that none waits."""
        (highest_C, sums_C), (_, scores_C) = met, scores(index)
        higher_C = jnp.maximum(highest_C, scores_C)
        return higher_C, sums_C * jnp.exp2(highest_C - higher_C) + jnp.exp2(scores_C - higher_C)

    start = jnp.full(columns, lowest * log2_e, jnp.float32), jnp.zeros(columns, jnp.float32)
    highest_C, sums_C = jax.lax.fori_loop(0, blocks, include, start)
    highest = highest_C.max(axis=0)
    log_sum = highest + jnp.log2((sums_C * jnp.exp2(highest_C - highest)).sum(axis=0))

    def write(step: jax.Array, _: None) -> None:
        index = blocks - 1 - step  # what was read last may still be in the cache
        column_C, scores_C = scores(index)
        d_scores_C = weight * (jnp.exp2(scores_C - log_sum) - jnp.where(column_C == target, 1.0, 0.0))
        here = d_scores_ref.at[row, pl.ds(index * columns, columns)]
        triton.store(here, d_scores_C.astype(d_scores_ref.dtype), mask=column_C < width)

    jax.lax.fori_loop(0, blocks, write, None)
    losses_ref[row] = log_sum / log2_e - scores_ref[row, target].astype(jnp.float32)


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


def _in_rounds(many: int, read: Any, work: Any, start: Any) -> Any:
    """Within a kernel: rounds one after another, where what the next one reads is on its way while one works.

    Arguments:
        many: rounds.
        read: of a round's number, what it needs.
        work: of its number, what was read, and what the last round returned, what it returns.
        start: what the first one gets for the last one's.
    """

    def one(index: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        made, given = carried
        following = read(jnp.minimum(index + 1, many - 1))
        return work(index, given, made), following

    return jax.lax.fori_loop(0, many, one, (start, read(0)))[0]


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
