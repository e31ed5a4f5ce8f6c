"""The JAX engine: a model in Flax NNX, one compiled step, state that stays on the device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.base import Sampling
from meshwright.engines.jax.checkpoint import restore_state, save_state
from meshwright.engines.jax.decode import Generator
from meshwright.engines.jax.optimizer import evaluation_params, make_optimizer, make_schedule
from meshwright.engines.jax.step import Metric, Params, TrainState, make_loss, make_train_step
from meshwright.errors import UserError
from meshwright.models.decoder import Decoder
from meshwright.models.spec import ModelSpec

RESERVED_METRICS = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu"}

ModelMaker = Callable[..., nnx.Module]


class JaxEngine:
    """See `meshwright.engines.base.Engine`.

    Arguments:
        run: a checked run file.
        spec: the architecture, with its vocabulary size.
        model: makes the model from `(spec, rngs=…)`; it has the methods of `Decoder`, which is the default.
        optimizer: a researcher's own in place of the run file's.
        metrics: scalars of an `Update`, by name, reported with each step.
        training: false where the engine only evaluates and generates: it then holds no optimizer state, and restores
            from a checkpoint whatever optimizer wrote it.
    """

    def __init__(
        self,
        run: Run,
        spec: ModelSpec,
        *,
        model: ModelMaker = Decoder,
        optimizer: optax.GradientTransformation | None = None,
        metrics: dict[str, Metric] | None = None,
        training: bool = True,
    ):
        if taken := RESERVED_METRICS & (metrics or {}).keys():
            raise UserError(f"metric {min(taken)!r}: is the name of a record's own key; call it something else")
        self.rows = slice(0, run.train.batch_size)
        dtype = compute_dtype(run)
        self.description = f"{_devices()}, {jnp.dtype(dtype).name}"
        graph, params = initial_params(model, spec, run.seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.identity = {
            "model": getattr(model, "__qualname__", repr(model)),
            "optimizer.kind": run.optimizer.kind if optimizer is None else "own",
        }
        schedule = None if optimizer else make_schedule(run, run.optimizer.learning_rate)
        averages = optimizer is None and run.optimizer.kind == "schedule_free"  # then evaluation needs its state
        optimizer = optimizer or (make_optimizer(run) if training or averages else optax.identity())
        self._state = jax.jit(_initial_state, static_argnums=1)(params, optimizer.init)
        loss_sum = make_loss(graph, dtype, run.train.scan_layers)
        step = make_train_step(run, loss_sum, optimizer, schedule, metrics or {})
        self._train_step = jax.jit(step, donate_argnums=0)
        self._eval_step = jax.jit(loss_sum)
        self._average = jax.jit(evaluation_params)
        self._all_finite = jax.jit(_all_finite)
        self._generator = Generator(graph, spec.context_length, dtype)

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """See `Engine.train_step`."""
        self._state, values = self._train_step(self._state, batch)
        return values

    def eval_step(self, batch: Batch) -> tuple[Any, Any]:
        """See `Engine.eval_step`."""
        return self._eval_step(self._evaluation_params(), batch)

    def is_finite(self) -> bool:
        """See `Engine.is_finite`."""
        return bool(self._all_finite(self._state.params))

    def save(self, folder: Path) -> Callable[[], None]:
        """See `Engine.save`."""
        return save_state(folder, self._state)

    def restore(self, folder: Path) -> None:
        """See `Engine.restore`."""
        self._state = restore_state(folder, self._state)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """See `Engine.generate`."""
        yield from self._generator(self._evaluation_params(), prompts, max_tokens, stop, sampling)

    def _evaluation_params(self) -> Params:
        if isinstance(self._state.optimizer, optax.contrib.ScheduleFreeState):
            return self._average(self._state.optimizer, self._state.params)
        return self._state.params


def initial_params(model: ModelMaker, spec: ModelSpec, seed: int) -> tuple[nnx.GraphDef, Params]:
    """The graph of a model, and the parameters that a seed gives it, made in one compiled function.

    Returns:
        The graph definition, and parameters as nested dictionaries; `nnx.merge` puts them together again.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: model(spec, rngs=nnx.Rngs(params=seed))))

    def make() -> Params:
        return nnx.to_pure_dict(nnx.state(model(spec, rngs=nnx.Rngs(params=seed)), nnx.Param))

    return graph, jax.jit(make)()


def compute_dtype(run: Run) -> Any:
    """The type that activations are computed in."""
    if run.train.compute_dtype != "auto":
        return jnp.dtype(run.train.compute_dtype)
    return jnp.dtype(np.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _all_finite(params: Params) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _initial_state(params: Params, init: Callable[[Params], optax.OptState]) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, init(params))


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
