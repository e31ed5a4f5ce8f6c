"""The one definition of the loss: sum of token losses over count of tokens, both over the whole global batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


class LossSum(NamedTuple):
    """Two sums that add up over micro-batches; their quotient is the loss, in nats a token."""

    total: jax.Array
    tokens: jax.Array


def cross_entropy_sum(logits_BTV: jax.Array, targets_BT: ArrayLike, weights_BT: ArrayLike) -> LossSum:
    """Sum of the cross-entropies of the targets, in nats, computed in float32.

    Arguments:
        logits_BTV: scores of the next token.
        targets_BT: the token that came.
        weights_BT: 1 where the token counts, 0 where it doesn't.
    """
    logits_BTV, targets_BT, weights_BT = (
        logits_BTV.astype(jnp.float32),
        jnp.asarray(targets_BT),
        jnp.asarray(weights_BT),
    )
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT
    return LossSum((losses_BT * weights_BT).sum(), weights_BT.sum())
