"""Text generation with a key-value cache of fixed shape: one prefill, then one compiled step a token.

Shapes: B prompts, P padded prompt length, S cached positions, V vocabulary.

Prompts are padded on the right. Row `b` writes its next token at its own next position, over the padding, and looks
at no position beyond it; so rows of different lengths share a batch without seeing each other's padding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.engines.base import Sampling
from meshwright.engines.jax.program import Program
from meshwright.errors import UserError

_ROUND = 64  # prompt and cache lengths are rounded up to this, so that few shapes are compiled


class Generator:
    """Generates from a decoder; compiled functions are kept from call to call.

    Arguments:
        program: the run's; its model has `empty_cache` and `decode`.
    """

    def __init__(self, program: Program):
        self._context_length = program.spec.context_length
        self._empty_cache = program.compiled(_empty_cache(program), ordered=True, static_argnums=(1, 2))
        out = None if program.everywhere is None else (program.everywhere, None)
        self._next = program.compiled(_next_tokens(program), ordered=True, donate_argnums=4, out_shardings=out)

    def __call__(
        self, params: Any, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """See `Engine.generate`.

        Raises:
            UserError: a prompt is empty, or a prompt and what is to come exceed the context length.
        """
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(lengths_B.max())
        if lengths_B.min() == 0:
            raise UserError("prompt = '': must hold at least one token; begin with the end-of-text token instead")
        if longest >= self._context_length:
            raise UserError(
                f"prompt: its {longest} tokens must be fewer than model.context_length = {self._context_length}; "
                "shorten it"
            )
        if longest + max_tokens > self._context_length:
            raise UserError(
                f"max_tokens = {max_tokens}: prompt ({longest} tokens) and continuation must fit "
                f"model.context_length = {self._context_length}; ask for at most {self._context_length - longest}"
            )
        tokens_BP = np.full((len(prompts), min(_round_up(longest), self._context_length)), stop, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, : len(prompt)] = prompt
        cache = self._empty_cache(params, len(prompts), min(_round_up(longest + max_tokens), self._context_length))
        positions_BP = np.broadcast_to(np.arange(tokens_BP.shape[1], dtype=np.int32), tokens_BP.shape)
        next_B, cache = self._next(params, tokens_BP, positions_BP, lengths_B - 1, cache, sampling)
        ended = np.zeros(len(prompts), bool)
        for count in range(max_tokens):
            chosen = np.asarray(next_B)
            if count + 1 < max_tokens:  # the device works on the next token while this one is shown
                positions_B1 = (lengths_B + count)[:, None]
                next_B, cache = self._next(
                    params, next_B[:, None], positions_B1, np.zeros_like(lengths_B), cache, sampling
                )
            ended |= chosen == stop
            if ended.all():
                return
            yield [None if done else int(token) for token, done in zip(chosen, ended, strict=True)]


def _empty_cache(program: Program) -> Callable[[Any, int, int], Any]:
    def empty_cache(params: Any, batch: int, length: int) -> Any:
        return nnx.merge(program.state.graph, params).empty_cache(batch, length, program.dtype)

    return empty_cache


def _next_tokens(program: Program) -> Callable[..., tuple[jax.Array, Any]]:
    def next_tokens(
        params: Any,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        last_B: jax.Array,
        cache: Any,
        sampling: Sampling,
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(program.state.graph, program.state.in_order(params))
        x_BTD, cache = model.decode(tokens_BT, positions_BT, cache, dtype=program.dtype)
        x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        logits_BV = model.logits(x_B1D)[:, 0].astype(jnp.float32)
        position_B = jnp.take_along_axis(positions_BT, last_B[:, None], axis=1)[:, 0]
        return sample(logits_BV, position_B, sampling), cache

    return next_tokens


def sample(logits_BV: jax.Array, position_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose a token for each row.

    Top-k is applied first, then top-p (Holtzman et al., 2020) to what is left; the likeliest token always stays.

    Arguments:
        logits_BV: scores, float32.
        position_B: where the token before stands; with the seed and the row it makes the random key.
        sampling: its numbers may be traced, so that changing them compiles nothing.

    Returns:
        Token ids, `[B]`.
    """
    scaled_BV = logits_BV / jnp.maximum(sampling.temperature, 1e-6)
    sorted_BV = -jnp.sort(-scaled_BV, axis=-1)
    vocab = logits_BV.shape[-1]
    rank_V = jnp.arange(vocab)
    k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
    probs_BV = jax.nn.softmax(jnp.where(rank_V < k, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_BV = (rank_V < k) & ((before_BV < sampling.top_p) | (rank_V == 0))
    threshold_B1 = jnp.take_along_axis(sorted_BV, kept_BV.sum(axis=-1, keepdims=True) - 1, axis=-1)
    allowed_BV = jnp.where(scaled_BV >= threshold_B1, scaled_BV, -jnp.inf)
    fold = jax.vmap(jax.random.fold_in)
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(sampling.seed), jnp.arange(logits_BV.shape[0])
    )
    drawn_B = jax.vmap(jax.random.categorical)(fold(keys_B, position_B), allowed_BV)
    return jnp.where(sampling.temperature <= 0, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)


def _round_up(length: int) -> int:
    return -(-length // _ROUND) * _ROUND
