"""The two compiled functions: one update, one evaluation.

Shapes: A accumulated micro-batches, M examples of a micro-batch, T time, V vocabulary; B = A M.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.jax.loss import Head, LossSum, cross_entropy_sum
from meshwright.errors import UserError

Params = Any

# Tokens whose scores are made at a time: they stay in a CPU's cache, and spare an accelerator's memory.
_CHUNK = 512


class TrainState(NamedTuple):
    """All that changes from step to step; `step` counts the updates done."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


class Update(NamedTuple):
    """What a researcher's own metric may look at."""

    params: Params
    gradients: Params
    updates: Params
    loss: jax.Array


Metric = Callable[[Update], jax.Array]


def make_loss(graph: nnx.GraphDef, dtype: jnp.dtype, scan_layers: bool) -> Callable[..., LossSum]:
    """The loss sum as a function of parameters, a batch and dropout keys (None: no dropout)."""

    def loss_sum(params: Params, batch: Batch, dropout_keys_B: jax.Array | None = None) -> LossSum:
        model = nnx.merge(graph, params)
        x_BTD = model.hidden(batch.inputs_BT, dtype=dtype, dropout_keys_B=dropout_keys_B, scan_layers=scan_layers)
        x_ND, targets_N = x_BTD.reshape(-1, x_BTD.shape[-1]), batch.targets_BT.reshape(-1)
        return cross_entropy_sum(x_ND, Head(*model.head_weights()), targets_N, batch.weights_BT.reshape(-1), _CHUNK)

    return loss_sum


def make_train_step(
    run: Run,
    loss_sum: Callable[..., LossSum],
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule | None,
    metrics: dict[str, Metric],
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """One update on one global batch.

    Arguments:
        run: batch sizes, seed, clipping and what to do with a loss that isn't finite.
        loss_sum: from `make_loss`.
        optimizer: from `make_optimizer`, or a researcher's own.
        learning_rate: what the metrics report; None: nothing, since only the optimizer knows.
        metrics: a researcher's own, each a scalar of an `Update`.
    """
    accumulate = run.train.batch_size // run.micro_batch_size

    def gradients_of(params: Params, batch: Batch, keys_B: jax.Array) -> tuple[Params, LossSum]:
        def total(params: Params) -> tuple[jax.Array, LossSum]:
            loss = loss_sum(params, batch, keys_B)
            return loss.total, loss

        return jax.grad(total, has_aux=True)(params)

    def accumulated(params: Params, batch: Batch, keys_B: jax.Array) -> tuple[Params, LossSum]:
        if accumulate == 1:
            return gradients_of(params, batch, keys_B)
        micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), (batch, keys_B))

        def add(sums: tuple[Params, LossSum], one: tuple[Batch, jax.Array]) -> tuple[tuple[Params, LossSum], None]:
            return jax.tree.map(jnp.add, sums, gradients_of(params, *one)), None

        zeros = jax.tree.map(jnp.zeros_like, (params, LossSum(jnp.zeros(()), jnp.zeros(()))))
        return jax.lax.scan(add, zeros, micro)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        keys_B = example_keys(run.seed, state.step, run.train.batch_size)
        sums, loss = accumulated(state.params, batch, keys_B)
        tokens = jnp.maximum(loss.tokens, 1.0)
        gradients = jax.tree.map(lambda g: g / tokens, sums)
        norm = optax.global_norm(gradients)
        if run.optimizer.clip_norm:
            shrink = jnp.minimum(1.0, run.optimizer.clip_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * shrink, gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state)
        values = {"loss": loss.total / tokens, "grad_norm": norm, "tokens": loss.tokens}
        if learning_rate is not None:
            values["learning_rate"] = learning_rate(state.step)
        update = Update(state.params, gradients, updates, values["loss"])
        values |= {name: _scalar(name, metric(update)) for name, metric in metrics.items()}
        if run.train.on_nonfinite == "skip":
            new = _keep_if(jnp.isfinite(values["loss"]) & jnp.isfinite(norm), new, state)
        return new, values

    return train_step


def example_keys(seed: int, step: jax.Array, batch_size: int) -> jax.Array:
    """A random key for each example of a global batch, `[B]`: a function of the seed, the step and its row alone."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, jnp.arange(batch_size))


def _scalar(name: str, value: jax.Array) -> jax.Array:
    if jnp.shape(value) != ():
        raise UserError(f"metric {name!r}: returns an array of shape {jnp.shape(value)}; it must return a scalar")
    return value


def _keep_if(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    # Counters go on, so that the schedule stays a function of the step.
    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(finite, new, old)

    return jax.tree.map(choose, new, old)
