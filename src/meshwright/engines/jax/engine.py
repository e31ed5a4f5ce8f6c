"""The JAX engine: a model in Flax NNX, one compiled step, state that stays on the device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.base import RESTORED, Sampling
from meshwright.engines.jax.checkpoint import fits_twice, restore_state, save_state
from meshwright.engines.jax.decode import Generator
from meshwright.engines.jax.estimate import flops_per_token
from meshwright.engines.jax.hf import HostParameters, logits_of, make_logits
from meshwright.engines.jax.memory_check import fitting_train_step
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.start import start_state
from meshwright.engines.jax.state import ModelMaker
from meshwright.engines.jax.step import Metric, Params, TrainState, uses_float8
from meshwright.engines.jax.trained import Merged
from meshwright.engines.peaks import peak_flops
from meshwright.errors import UserError
from meshwright.hub.export import Parameters
from meshwright.hub.reader import Checkpoint
from meshwright.models.decoder import Decoder, active_parameter_count
from meshwright.models.hf import spec_from_hf
from meshwright.models.spec import ModelSpec
from meshwright.storage.store import is_remote

RESERVED_METRICS = {
    *("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu", "epochs"),
    *("router_penalty", "expert_load", "expert_load_max", "dropped"),
    *("stop", "val_loss", "val_perplexity", "val_bits_per_byte"),
}


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
        self._program = program = Program(
            run, spec, model=model, optimizer=optimizer, metrics=metrics, training=training
        )
        self.rows = program.mesh.rows(run.train.batch_size)
        self.parameters = self.active_parameters = program.state.parameters
        self.trained_parameters = program.state.trained_parameters
        if spec.experts:
            self.active_parameters = active_parameter_count(spec)
        self.token_seconds = _token_seconds(program)
        products = ", products in float8" if uses_float8(run, program.dtype) else ""
        self.description = f"{_devices()}, {program.dtype.name}{products}{_mesh_in_words(program.mesh.sizes)}"
        self.identity = {
            "model": getattr(model, "__qualname__", repr(model)),
            "optimizer.kind": run.optimizer.kind if optimizer is None else "own",
        }
        self._train_step = fitting_train_step(program, training=training)
        self._state = _first_state(program, training=training)
        self._average: Params | None = None
        if run.lora.rank:
            two = np.asarray(program.base_fingerprint(self._state.params))
            self.identity["lora (fingerprint of the base)"] = "".join(f"{number:08x}" for number in two)
        self._generator = Generator(program)
        self._fits_twice: bool | None = None

    def train_step(self, batch: Batch, stop: int = 0) -> dict[str, Any]:
        """See `Engine.train_step`."""
        mesh, self._average = self._program.mesh, None
        self._state, values = self._train_step(self._state, mesh.place(batch), mesh.to_agree_on(stop))
        return values

    def eval_step(self, batch: Batch) -> tuple[Any, Any]:
        """See `Engine.eval_step`."""
        loss = self._program.eval_step(self._evaluation_params(), self._program.mesh.place(batch))
        return loss.total, loss.tokens

    def trace(self, folder: Path) -> AbstractContextManager:
        """See `Engine.trace`."""
        return jax.profiler.trace(str(folder), create_perfetto_trace=True)

    def is_finite(self) -> bool:
        """See `Engine.is_finite`."""
        return bool(self._program.all_finite(self._state.params))

    def save(self, folder: Path) -> Callable[[], None]:
        """See `Engine.save`."""
        plan, apart = self._program.state, is_remote(self._program.run.run_dir)
        if self._fits_twice is None:
            self._fits_twice = fits_twice(self._state, plan)
        return save_state(folder, self._state, plan, apart=apart, twice=self._fits_twice)

    def restore(self, folder: Path) -> None:
        """See `Engine.restore`."""
        plan = self._program.state
        like = plan.abstract()
        kept = plan.trained.put(plan.trained.of(like.params), self._state.params)
        self._state, self._average = like._replace(params=kept), None  # a device may have no room for the state twice
        try:
            self._state = restore_state(folder, self._state, plan)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"{folder}: isn't damaged, but finds no room in the memory of the devices; see what else runs on them, "
                f"use devices with more, or raise mesh.fsdp = {self._program.mesh.sizes['fsdp']}"
            ) from error

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """See `Engine.generate`."""
        yield from self._generator(self._evaluation_params(), prompts, max_tokens, stop, sampling)

    def on_host(self) -> Parameters:
        """See `Engine.on_host`."""
        host, program = self.adapters_on_host(), self._program
        return Merged(host, program.spec, program.run) if program.run.lora.rank else host

    def adapters_on_host(self) -> HostParameters:
        """See `Engine.adapters_on_host`; the other parameters can be read too."""
        return HostParameters(self._evaluation_params(), self._program.spec, self._program)

    def logits(self, tokens_BT: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """See `Engine.logits`."""
        program = self._program
        logits = make_logits(program.state, dtype)
        compiled = program.compiled(logits, ordered=True, out_shardings=program.everywhere)
        return np.asarray(compiled(self._evaluation_params(), jnp.asarray(tokens_BT)))

    def logits_of(self, checkpoint: Checkpoint, tokens_BT: np.ndarray) -> np.ndarray:
        """See `Engine.logits_of`."""
        return logits_of(checkpoint, spec_from_hf(checkpoint.config), self._program.run, tokens_BT)

    def _evaluation_params(self) -> Params:
        state, trained = self._state, self._program.state.trained
        if not isinstance(state.optimizer, optax.contrib.ScheduleFreeState):
            return state.params
        if self._average is None:
            average = self._program.average(state.optimizer, trained.of(state.params))
            self._average = trained.put(average, state.params)
        return self._average


def _first_state(program: Program, *, training: bool) -> TrainState:
    run = program.run
    if run.model.init == RESTORED:
        return program.state.abstract()  # a checkpoint holds all
    if run.model.init != "random" and (training or run.lora.rank):
        return start_state(program)
    return program.make_state()


def _token_seconds(program: Program) -> float | None:
    """See `Engine.token_seconds`; the peak is one of bfloat16."""
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None or program.dtype != jnp.bfloat16:
        return None
    adapters = program.state.trained_parameters if program.run.lora.rank else 0
    return flops_per_token(program.spec, program.run.train.sequence_length, adapters) / (peak * jax.device_count())


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind


def _mesh_in_words(sizes: dict[str, int]) -> str:
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"; {' x '.join(words)}" if words else ""
