"""The two compiled functions: one update, one evaluation.

Shapes: A micro-batches of M examples, T time, D width, L layers, E experts; the global batch B = A M.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.jax.loss import Head, sharded_cross_entropy_sum
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.pipeline import pipelined
from meshwright.engines.jax.trained import Trained
from meshwright.errors import UserError
from meshwright.models import float8
from meshwright.models.layout import layout
from meshwright.models.routing import Routing, keep_untrained
from meshwright.models.spec import ModelSpec
from meshwright.models.stacks import STACKS

Params = Any

_SCORES = 2**28  # 1 GiB


def loss_chunk(vocab: int) -> int:
    """Tokens whose scores are made at a time.

    On a CPU few enough for its cache. On an accelerator the head's gradient is read and written once a chunk, so there
    are as many as take a bounded part of its memory.

    Arguments:
        vocab: scores of a token.
    """
    if jax.default_backend() == "cpu":
        return 512
    return max(512, 2 ** int(math.log2(_SCORES / vocab)))


def scans_layers(run: Run) -> bool:
    """Whether layers are a loop: where they are to be, and where a GPU is to be deterministic (see `Program`)."""
    return run.train.scan_layers or (run.train.deterministic and jax.default_backend() == "gpu")


def uses_float8(run: Run, dtype: jnp.dtype) -> bool:
    """Whether linear maps multiply in float8: where they are to, in a type of 16 bits, on devices that can.

    Of training the latter two are certain (see `Program`); a trained model is opened elsewhere, too.
    """
    return run.train.float8 and jnp.dtype(dtype).itemsize == 2 and float8.is_here()


class TrainState(NamedTuple):
    """All that changes from step to step; `step` counts the updates done."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


class LossSum(NamedTuple):
    """Sums that add up over micro-batches; `total / tokens` is the loss, in nats a token."""

    total: jax.Array
    tokens: jax.Array
    routing: Routing | None
    """Of each layer, where there are experts."""


class Update(NamedTuple):
    """What a researcher's own metric may look at: of parameters, just those that are trained."""

    params: Params
    gradients: Params
    updates: Params
    loss: jax.Array


Metric = Callable[[Update], jax.Array]
Loss = Callable[..., LossSum]


def make_loss(graph: nnx.GraphDef, run: Run, spec: ModelSpec, run_mesh: RunMesh, dtype: jnp.dtype) -> Loss:
    """The loss sum as a function of parameters, micro-batches `[A, M, T]` and dropout keys `[A, M]` (None: no dropout).

    In a pipeline A is whatever it is, otherwise 1.
    """
    sizes, shares = run_mesh.sizes, run_mesh.loss_shares(run)
    scan_layers, in_float8 = scans_layers(run), uses_float8(run, dtype)

    def hidden(model: Any, batch: Batch, keys_AM: jax.Array | None) -> tuple[jax.Array, Routing | None]:
        if sizes["pipeline"] == 1:
            one = jax.tree.map(lambda x_AMT: x_AMT[0], batch)
            x_MTD, routing_L = model.hidden(
                one.inputs_BT,
                positions_BT=one.positions_BT,
                segments_BT=one.segments_BT,
                weights_BT=one.weights_BT,
                dtype=dtype,
                dropout_keys_B=None if keys_AM is None else keys_AM[0],
                scan_layers=scan_layers,
                remat=run.train.remat,
            )
            return x_MTD[None], routing_L
        rows_AMTD = model.embedded(batch.inputs_BT, dtype)  # of all at once: else each had a gradient of the table
        starts_A = jax.vmap(
            lambda rows, one, keys: model.start(rows, one.positions_BT, one.segments_BT, one.weights_BT, dtype, keys)
        )(rows_AMTD, batch, keys_AM)
        x_AMTD, routing_L = pipelined(
            model,
            starts_A,
            stages=sizes["pipeline"],
            rounds=run_mesh.rounds,
            scan_layers=scan_layers,
            remat=run.train.remat,
        )
        return model.finish(x_AMTD), routing_L

    def loss_sum(params: Params, batch: Batch, keys_AM: jax.Array | None = None) -> LossSum:
        model = nnx.merge(graph, params)
        later = *STACKS, "embedding", "head"  # gathered where they are used
        gathered = {name: part for name, part in nnx.state(model, nnx.Param).items() if name not in later}
        nnx.update(model, nnx.State(layout().gather(gathered, dtype)))
        with float8.use(in_float8):
            x_AMTD, routing_L = hidden(model, batch, keys_AM)
        x_AMTD = layout().place(x_AMTD, None, "batch", "loss_time", None)
        total = sharded_cross_entropy_sum(
            x_AMTD,
            Head(*model.head_weights()),
            jnp.asarray(batch.targets_BT),
            jnp.asarray(batch.weights_BT),
            chunk=loss_chunk(spec.vocab_size),
            vocab=spec.vocab_size,
            softcap=spec.final_softcap,
            shares=shares,
        )
        return LossSum(total, jnp.asarray(batch.weights_BT).sum(), routing_L)

    return loss_sum


def make_eval_step(loss_sum: Loss, run_mesh: RunMesh) -> Callable[[Params, Batch], LossSum]:
    """The loss sum of a global batch `[A, M, T]`, without dropout."""

    def eval_step(params: Params, batch: Batch) -> LossSum:
        return _summed(lambda batch, _: loss_sum(params, batch), run_mesh, batch, None)

    return eval_step


def make_train_step(
    run: Run,
    loss_sum: Loss,
    run_mesh: RunMesh,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule | None,
    metrics: dict[str, Metric],
    trained: Trained,
    in_order: Callable[[Params], Params],
    as_stored: Callable[[Params], Params],
) -> Callable[[TrainState, Batch, jax.Array | None], tuple[TrainState, dict[str, jax.Array]]]:
    """One update on one global batch `[A, M, T]`; given a number by each process, it also returns the largest.

    Arguments:
        run: batch sizes, seed, clipping and what to do with a loss that isn't finite.
        loss_sum: from `make_loss`.
        run_mesh: says how many micro-batches there are, and whether the loss takes them all at once.
        optimizer: from `make_optimizer`, or a researcher's own.
        learning_rate: what the metrics report; None: nothing, since only the optimizer knows.
        metrics: a researcher's own, each a scalar of an `Update`.
        trained: which parameters are trained; the others come out as they went in.
        in_order: puts the layers in order for the metrics.
        as_stored: puts gradients in memory as parameters are.
    """

    def gradients_of(params: Params, batch: Batch, keys_AM: jax.Array) -> tuple[Params, LossSum]:
        def objective(part: Params) -> tuple[jax.Array, LossSum]:
            loss = loss_sum(trained.put(part, params), batch, keys_AM)
            return loss.total + (0.0 if loss.routing is None else loss.routing.penalty.sum()), loss

        return jax.grad(objective, has_aux=True)(trained.of(params))

    def train_step(
        state: TrainState, batch: Batch, stop: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        keys_AM = example_keys(run.seed, state.step, run.train.batch_size).reshape(run_mesh.accumulate, -1)
        sums, loss = _summed(partial(gradients_of, state.params), run_mesh, batch, keys_AM)
        tokens = jnp.maximum(loss.tokens, 1.0)
        gradients = jax.tree.map(lambda g: g / tokens, as_stored(sums))
        norm = optax.global_norm(gradients)
        if run.optimizer.clip_norm:
            shrink = jnp.minimum(1.0, run.optimizer.clip_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * shrink, gradients)
        params = trained.of(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, params)
        updated = keep_untrained(optax.apply_updates(params, updates), params)
        new = TrainState(state.step + 1, trained.put(updated, state.params), optimizer_state)
        values = {"loss": loss.total / tokens, "grad_norm": norm, "tokens": loss.tokens}
        if learning_rate is not None:
            values["learning_rate"] = learning_rate(state.step)
        if stop is not None:
            values["stop"] = stop.max()
        if loss.routing is not None:
            values |= _routing_values(loss.routing, tokens)
        update = Update(in_order(params), in_order(gradients), in_order(updates), values["loss"])
        values |= {name: _scalar(name, metric(update)) for name, metric in metrics.items()}
        if run.train.on_nonfinite == "skip":
            new = _keep_if(jnp.isfinite(values["loss"]) & jnp.isfinite(norm), new, state)
        return new, values

    return train_step


def _summed(f: Callable[..., Any], run_mesh: RunMesh, batch: Batch, keys_AM: jax.Array | None) -> Any:
    """`f(batch, keys)` of all micro-batches: a pipeline takes them at once, otherwise they come one at a time."""
    if run_mesh.accumulate == 1 or run_mesh.sizes["pipeline"] > 1:
        return f(batch, keys_AM)
    ones = jax.tree.map(lambda x: x[:, None], (batch, keys_AM))

    def add(sums: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, f(*one)), None

    like = jax.eval_shape(f, *jax.tree.map(lambda x: x[0], ones))
    return jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), ones)[0]


def _routing_values(routing_L: Routing, tokens: jax.Array) -> dict[str, jax.Array]:
    share_LE = routing_L.load_E / jnp.maximum(routing_L.load_E.sum(axis=1, keepdims=True), 1.0)
    return {
        "router_penalty": routing_L.penalty.sum() / tokens,
        "expert_load": share_LE.mean(axis=0),
        "expert_load_max": share_LE.max() * share_LE.shape[1],
        "dropped": routing_L.dropped.sum() / jnp.maximum(routing_L.load_E.sum(), 1.0),
    }


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
