"""The step that tutorials of Flax teach: GPT-2 of NNX modules, a dense causal mask, dropout, all scores at once.

Shapes: B batch, T time, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

RATE = 0.1


class Block(nnx.Module):
    """Pre-norm attention and MLP, each with dropout."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dtype=dtype, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.dropout_1, self.dropout_2 = nnx.Dropout(RATE, rngs=rngs), nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, mask_TT: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.dropout_1(self.attention(self.norm_1(x_BTD), mask=mask_TT))
        return x_BTD + self.dropout_2(self.down(nnx.gelu(self.up(self.norm_2(x_BTD)))))


class GPT2(nnx.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, case: dict[str, Any], dtype: Any, rngs: nnx.Rngs):
        width = case["width"]
        self.tokens = nnx.Embed(case["vocab"], width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(case["time"], width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.blocks = nnx.List([Block(width, case["heads"], dtype, rngs) for _ in range(case["layers"])])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        time = tokens_BT.shape[1]
        mask_TT = jnp.tril(jnp.ones((time, time)))
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(jnp.arange(time)))
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_TT)
        return self.tokens.attend(self.norm(x_BTD))


def make_step(case: dict[str, Any]) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """A function from inputs and targets, `[B, T]`, to the loss, which it doesn't wait for.

    Arguments:
        case: of `gpu_train.CASES`.
    """
    model = GPT2(case, jnp.bfloat16, nnx.Rngs(0))
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)

    def loss_of(model: GPT2, inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        logits_BTV = model(inputs_BT).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()

    @nnx.jit
    def step(model: GPT2, optimizer: nnx.Optimizer, inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, inputs_BT, targets_BT)
        optimizer.update(model, gradients)
        return loss

    return lambda inputs_BT, targets_BT: step(model, optimizer, inputs_BT, targets_BT)
