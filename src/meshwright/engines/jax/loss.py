"""The one definition of the loss: sum of token losses over count of tokens, both over the whole global batch.

Shapes: A micro-batches of M examples, T time, N tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from meshwright.engines.jax.manual import manual
from meshwright.engines.jax.rules import ACTIVATIONS, GATHERED
from meshwright.models import kernels
from meshwright.models.gradients import capped, settled
from meshwright.models.layout import Layout, layout, use_layout

_ROUND = 128  # chunks of tokens are a multiple of it
_COLUMNS = 128  # of which a GPU's matrix units want a multiple


class Head(NamedTuple):
    """The linear map from the residual stream to the scores of the next token."""

    kernel_DV: jax.Array
    bias_V: jax.Array | None


def sharded_cross_entropy_sum(
    x_AMTD: jax.Array,
    head: Head,
    targets_AMT: jax.Array,
    weights_AMT: jax.Array,
    *,
    chunk: int,
    vocab: int,
    softcap: float = 0.0,
    shares: tuple[int, int],
) -> jax.Array:
    """As `cross_entropy_sum`, of examples and time that lie cut along a mesh.

    Chunks are taken within each share, so none has to move; each adds up a head gradient of its own.

    Arguments:
        shares: into how many M and T are cut.
    """
    many, long = shares

    def by_share(x: jax.Array) -> jax.Array:
        a, m, t = x.shape[:3]
        cut = jnp.moveaxis(x.reshape(a, many, m // many, long, t // long, *x.shape[3:]), (1, 3), (0, 1))
        return cut.reshape(many, long, -1, *x.shape[3:])

    total = partial(cross_entropy_sum, chunk=chunk, vocab=vocab, softcap=softcap)
    if long == 1 and layout().on_mesh and kernels.applies(x_AMTD[0]):
        return _on_each_device(total, x_AMTD, head, targets_AMT, weights_AMT)
    head = Head(layout().gather_kernel(head.kernel_DV, x_AMTD.dtype), head.bias_V)
    x, targets, weights = by_share(x_AMTD), by_share(targets_AMT), by_share(weights_AMT)
    if shares == (1, 1):
        return total(x[0, 0], head, targets[0, 0], weights[0, 0])
    over_time = jax.vmap(total, in_axes=(0, None, 0, 0))
    return jax.vmap(over_time, in_axes=(0, None, 0, 0))(x, head, targets, weights).sum()


def _on_each_device(
    total: Callable[..., jax.Array], x_AMTD: jax.Array, head: Head, targets_AMT: jax.Array, weights_AMT: jax.Array
) -> jax.Array:
    """The sum over the devices of what each makes of its examples, with kernels that XLA can't cut."""

    def here(x: jax.Array, targets: jax.Array, weights: jax.Array, kernel: jax.Array, *bias: jax.Array) -> jax.Array:
        with use_layout(Layout()):
            rows = (part.reshape(-1, *part.shape[3:]) for part in (x, targets.astype(jnp.int32), weights))
            x_ND, targets_N, weights_N = rows
            return total(x_ND, Head(_gathered(kernel, x.dtype), *(bias or (None,))), targets_N, weights_N)[None]

    axes = ACTIVATIONS["batch"]
    cut, whole = PartitionSpec(None, axes), PartitionSpec()
    bias = [] if head.bias_V is None else [head.bias_V]
    in_specs = (cut, cut, cut, PartitionSpec(GATHERED), *(whole for _ in bias))
    mapped = manual(here, in_specs, PartitionSpec(axes), axes)
    ids = targets_AMT.astype(jnp.float32)  # which holds them exactly
    return mapped(x_AMTD, ids, weights_AMT, head.kernel_DV, *bias).sum()


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(kernel_DV: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """All rows of a kernel, of which each device has some, rounded to this type; of their gradient each gets its own.

    The type is half as much to send. The gradient travels as it is: it is a sum.
    """
    return jax.lax.all_gather(kernel_DV.astype(dtype), GATHERED, tiled=True).astype(kernel_DV.dtype)


def _gathered_backward(_dtype: jnp.dtype, _: None, d_kernel_DV: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(d_kernel_DV, GATHERED, tiled=True),)


_gathered.defvjp(lambda kernel_DV, dtype: (_gathered(kernel_DV, dtype), None), _gathered_backward)


def cross_entropy_sum(
    x_ND: jax.Array,
    head: Head,
    targets_N: ArrayLike,
    weights_N: ArrayLike,
    *,
    chunk: int,
    vocab: int,
    softcap: float = 0.0,
) -> jax.Array:
    """Sum of the cross-entropies of the targets, in nats; softmax in float32, and scores, too, but for one case.

    In training on 16-bit activations where `kernels.cross_entropy` takes scores up, these are rounded to half precision
    (11 bits), less what all scores of a token have in common; beyond 65,504 the loss isn't finite.

    Scores are made a chunk of tokens at a time, never all at once. Where the gradient is wanted, it is computed along
    with the loss, while the scores of a chunk are at hand; the backward pass only scales it.

    Arguments:
        x_ND: the residual stream after the last norm.
        head: its scores are `x @ kernel + bias`.
        targets_N: the token that came.
        weights_N: 1 where the token counts, 0 where it doesn't.
        chunk: at most so many tokens at a time; of scores in half precision twice as many.
        vocab: the head's columns from here on are padding, which nothing is ever given to.
        softcap: bound c of the scores, as c tanh(score / c); 0: none.
    """
    targets_N, weights_N = jnp.asarray(targets_N), jnp.asarray(weights_N)
    in_half = _by_kernel(x_ND, head, softcap) and x_ND.dtype.itemsize == 2
    chunk = _even_chunk(x_ND.shape[0], 2 * chunk if in_half else chunk)
    missing = -x_ND.shape[0] % chunk  # filled up with tokens of weight 0
    x_ND = jnp.pad(x_ND, ((0, missing), (0, 0)))
    targets_N, weights_N = (jnp.pad(part, (0, missing)) for part in (targets_N, weights_N))
    return _total(x_ND, head, targets_N, weights_N, chunk, vocab, softcap)


def _even_chunk(tokens: int, most: int) -> int:
    """Of the size of chunks: as few as may be, and alike, so that little is filled up."""
    each = -(-tokens // -(-tokens // most))
    return each if each < _ROUND else -(-each // _ROUND) * _ROUND


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _total(
    x_ND: jax.Array, head: Head, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab: int, softcap: float
) -> jax.Array:
    wide = _widened(head, x_ND)

    def add(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_CD, targets_C, weights_C = one
        scores_CV, _ = _scores(x_CD, wide, vocab, softcap)
        losses_C = jax.nn.logsumexp(scores_CV, axis=-1) - _pick(scores_CV, targets_C)
        return total + (losses_C * weights_C).sum(), None

    return jax.lax.scan(add, jnp.zeros(()), _chunks(chunk, x_ND, targets_N, weights_N))[0]


def _total_and_gradient(
    x_ND: jax.Array, head: Head, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab: int, softcap: float
):
    wide = _widened(head, x_ND)
    scoring_DV = _for_scores(wide.kernel_DV, vocab) if _by_kernel(x_ND, head, softcap) else None

    def add(sums: tuple[jax.Array, Head], one: tuple[jax.Array, ...]):
        (total, d_head), (x_CD, targets_C, weights_C) = sums, one
        if scoring_DV is None:
            losses_C, d_scores_CV = _losses_and_gradients(x_CD, wide, targets_C, weights_C, vocab, softcap)
        else:
            kind = scoring_DV.dtype
            scores_CV = jnp.dot(x_CD.astype(kind), scoring_DV, preferred_element_type=kind)
            losses_C, d_scores_CV = kernels.cross_entropy(
                scores_CV, targets_C, weights_C, vocab=vocab, dtype=x_CD.dtype
            )
        d_kernel_DV = jnp.dot(settled(x_CD.T), d_scores_CV, preferred_element_type=jnp.float32)
        d_bias_V = None if d_head.bias_V is None else d_head.bias_V + d_scores_CV.astype(jnp.float32).sum(axis=0)
        d_x_CD = d_scores_CV @ wide.kernel_DV.T
        return (total + (losses_C * weights_C).sum(), Head(d_head.kernel_DV + d_kernel_DV, d_bias_V)), d_x_CD

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), wide)
    (total, d_wide), d_x = jax.lax.scan(add, (jnp.zeros(()), zeros), _chunks(chunk, x_ND, targets_N, weights_N))
    d_head = jax.tree.map(lambda d, leaf: d[..., : leaf.shape[-1]].astype(leaf.dtype), d_wide, head)
    return total, (d_x.reshape(x_ND.shape), d_head)


def _by_kernel(x_ND: jax.Array, head: Head, softcap: float) -> bool:
    return not layout().on_mesh and kernels.applies(x_ND) and head.bias_V is None and not softcap


def _for_scores(kernel_DV: jax.Array, vocab: int) -> jax.Array:
    """The kernel that scores are made with: one of 16 bits in half precision, so that scores are half as much to read.

    The mean of its columns is taken off, by which all scores of a token move alike, so that softmax stays: those of
    GPT-2 lie about -100, where half precision's steps are 0.06.
    """
    if kernel_DV.dtype == jnp.float32:
        return kernel_DV
    exact_DV = kernel_DV.astype(jnp.float32)
    return (exact_DV - exact_DV[:, :vocab].mean(axis=1, keepdims=True)).astype(jnp.float16)


def _losses_and_gradients(
    x_CD: jax.Array, head: Head, targets_C: jax.Array, weights_C: jax.Array, vocab: int, softcap: float
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropies of a chunk, `[C]`, and the weighed gradients by its scores, `[C, V]`."""
    scores_CV, slope_CV = _scores(x_CD, head, vocab, softcap)
    highest_C1 = scores_CV.max(axis=-1, keepdims=True)
    exp_CV = jnp.exp(scores_CV - highest_C1)
    sum_C1 = exp_CV.sum(axis=-1, keepdims=True)
    losses_C = (jnp.log(sum_C1) + highest_C1)[:, 0] - _pick(scores_CV, targets_C)
    d_scores_CV = (exp_CV / sum_C1 - _is_target(scores_CV, targets_C)) * weights_C[:, None]
    d_scores_CV = d_scores_CV if slope_CV is None else d_scores_CV * slope_CV
    return losses_C, jax.lax.optimization_barrier(d_scores_CV.astype(x_CD.dtype))  # read thrice: make it once


def _widened(head: Head, x_ND: jax.Array) -> Head:
    """The head, its kernel in the type of `x_ND`; on a GPU with columns of padding, as its matrix units want."""
    padded = jax.default_backend() == "gpu" and layout().whole_vocab
    missing = -head.kernel_DV.shape[1] % _COLUMNS if padded else 0
    bias_V = head.bias_V if head.bias_V is None or not missing else jnp.pad(head.bias_V, (0, missing))
    kernel_DV = head.kernel_DV.astype(x_ND.dtype)
    return Head(jnp.pad(kernel_DV, ((0, 0), (0, missing))) if missing else kernel_DV, bias_V)


def _scale(_chunk: int, _vocab: int, _softcap: float, gradients: tuple[jax.Array, Head], by: jax.Array):
    d_x_ND, d_head = jax.tree.map(lambda d: d * by.astype(d.dtype), gradients)
    return d_x_ND, d_head, None, None


_total.defvjp(_total_and_gradient, _scale)


def _scores(x_CD: jax.Array, head: Head, vocab: int, softcap: float) -> tuple[jax.Array, jax.Array | None]:
    scores_CV = jnp.dot(x_CD, head.kernel_DV, preferred_element_type=jnp.float32)
    scores_CV = scores_CV if head.bias_V is None else scores_CV + head.bias_V
    scores_CV, slope_CV = capped(scores_CV, softcap)
    if vocab == scores_CV.shape[1]:
        return scores_CV, slope_CV
    is_padding_CV = jax.lax.broadcasted_iota(jnp.int32, scores_CV.shape, 1) >= vocab
    return jnp.where(is_padding_CV, jnp.finfo(jnp.float32).min, scores_CV), slope_CV


def _is_target(scores_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets_C.dtype, scores_CV.shape, 1) == targets_C[:, None]


def _pick(scores_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    return jnp.where(_is_target(scores_CV, targets_C), scores_CV, 0.0).sum(axis=-1)  # a gather is slow on a CPU


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array.reshape(-1, chunk, *array.shape[1:]) for array in arrays)
