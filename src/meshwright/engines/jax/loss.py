"""The one definition of the loss: sum of token losses over count of tokens, both over the whole global batch.

Shapes: A micro-batches of M examples, T time, N tokens, D width, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshwright.models.gradients import capped


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
    x, targets, weights = by_share(x_AMTD), by_share(targets_AMT), by_share(weights_AMT)
    if shares == (1, 1):
        return total(x[0, 0], head, targets[0, 0], weights[0, 0])
    over_time = jax.vmap(total, in_axes=(0, None, 0, 0))
    return jax.vmap(over_time, in_axes=(0, None, 0, 0))(x, head, targets, weights).sum()


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
    """Sum of the cross-entropies of the targets, in nats; scores and softmax in float32.

    Scores are made a chunk of tokens at a time, never all at once. Where the gradient is wanted, it is computed along
    with the loss, while the scores of a chunk are at hand; the backward pass only scales it.

    Arguments:
        x_ND: the residual stream after the last norm.
        head: its scores are `x @ kernel + bias`.
        targets_N: the token that came.
        weights_N: 1 where the token counts, 0 where it doesn't.
        chunk: at most so many tokens at a time.
        vocab: the head's columns from here on are padding, which nothing is ever given to.
        softcap: bound c of the scores, as c tanh(score / c); 0: none.
    """
    targets_N, weights_N = jnp.asarray(targets_N), jnp.asarray(weights_N)
    chunk = min(chunk, x_ND.shape[0])
    missing = -x_ND.shape[0] % chunk  # filled up with tokens of weight 0
    x_ND = jnp.pad(x_ND, ((0, missing), (0, 0)))
    targets_N, weights_N = (jnp.pad(part, (0, missing)) for part in (targets_N, weights_N))
    return _total(x_ND, head, targets_N, weights_N, chunk, vocab, softcap)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _total(
    x_ND: jax.Array, head: Head, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab: int, softcap: float
) -> jax.Array:
    def add(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_CD, targets_C, weights_C = one
        scores_CV, _ = _scores(x_CD, head, vocab, softcap)
        losses_C = jax.nn.logsumexp(scores_CV, axis=-1) - _pick(scores_CV, targets_C)
        return total + (losses_C * weights_C).sum(), None

    return jax.lax.scan(add, jnp.zeros(()), _chunks(chunk, x_ND, targets_N, weights_N))[0]


def _total_and_gradient(
    x_ND: jax.Array, head: Head, targets_N: jax.Array, weights_N: jax.Array, chunk: int, vocab: int, softcap: float
):
    def add(sums: tuple[jax.Array, Head], one: tuple[jax.Array, ...]):
        (total, d_head), (x_CD, targets_C, weights_C) = sums, one
        scores_CV, slope_CV = _scores(x_CD, head, vocab, softcap)
        highest_C1 = scores_CV.max(axis=-1, keepdims=True)
        exp_CV = jnp.exp(scores_CV - highest_C1)
        sum_C1 = exp_CV.sum(axis=-1, keepdims=True)
        losses_C = (jnp.log(sum_C1) + highest_C1)[:, 0] - _pick(scores_CV, targets_C)
        d_scores_CV = (exp_CV / sum_C1 - _is_target(scores_CV, targets_C)) * weights_C[:, None]
        d_scores_CV = d_scores_CV if slope_CV is None else d_scores_CV * slope_CV
        d_scores_CV = jax.lax.optimization_barrier(d_scores_CV.astype(x_CD.dtype))  # read thrice: make it once
        d_kernel_DV = jnp.dot(jax.lax.optimization_barrier(x_CD.T), d_scores_CV, preferred_element_type=jnp.float32)
        d_bias_V = None if d_head.bias_V is None else d_head.bias_V + d_scores_CV.astype(jnp.float32).sum(axis=0)
        d_x_CD = d_scores_CV @ head.kernel_DV.T.astype(x_CD.dtype)
        return (total + (losses_C * weights_C).sum(), Head(d_head.kernel_DV + d_kernel_DV, d_bias_V)), d_x_CD

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), head)
    (total, d_head), d_x = jax.lax.scan(add, (jnp.zeros(()), zeros), _chunks(chunk, x_ND, targets_N, weights_N))
    return total, (d_x.reshape(x_ND.shape), jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_head, head))


def _scale(_chunk: int, _vocab: int, _softcap: float, gradients: tuple[jax.Array, Head], by: jax.Array):
    d_x_ND, d_head = jax.tree.map(lambda d: d * by.astype(d.dtype), gradients)
    return d_x_ND, d_head, None, None


_total.defvjp(_total_and_gradient, _scale)


def _scores(x_CD: jax.Array, head: Head, vocab: int, softcap: float) -> tuple[jax.Array, jax.Array | None]:
    scores_CV = jnp.dot(x_CD, head.kernel_DV.astype(x_CD.dtype), preferred_element_type=jnp.float32)
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
