"""All that a run compiles, before any of its arrays exists."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshwright.config import Run
from meshwright.engines.jax.compile_cache import use_compile_cache
from meshwright.engines.jax.layer_order import with_layers_in_order
from meshwright.engines.jax.mesh import RunMesh, make_run_mesh
from meshwright.engines.jax.optimizer import evaluation_params, make_optimizer, make_schedule
from meshwright.engines.jax.pipeline import stored_order
from meshwright.engines.jax.sharding import MeshLayout
from meshwright.engines.jax.state import ModelMaker, plan_state
from meshwright.engines.jax.step import Metric, Params, make_eval_step, make_loss, make_train_step
from meshwright.engines.jax.trained import base_fingerprint, model_of
from meshwright.errors import UserError
from meshwright.models import float8, kernels
from meshwright.models.layout import Layout, use_layout
from meshwright.models.spec import ModelSpec

# With them, on two H200s under JAX 0.11.2, data = 2 and several micro-batches gave a wrong gradient of the embedding.
PASSES_OFF_ON_GPUS = "while-loop-all-reduce-code-motion,all-reduce-reassociate,all-reduce-combiner"
_LEVEL = "xla_backend_optimization_level"


class Program:
    """The mesh of a run, the plan of its state, and its compiled functions. Nothing is allocated.

    Arguments:
        run: a checked run file.
        spec: the architecture, with its vocabulary size.
        model, optimizer, metrics, training: see `meshwright.engines.jax.engine.JaxEngine`.

    Raises:
        UserError: the mesh fits neither the devices nor the model or the batch, or there is no float8 to train in.
    """

    def __init__(
        self,
        run: Run,
        spec: ModelSpec,
        *,
        model: ModelMaker,
        optimizer: optax.GradientTransformation | None = None,
        metrics: dict[str, Metric] | None = None,
        training: bool = True,
    ):
        self.run, self.spec, self.model = run, spec, model
        use_compile_cache(run)
        self.mesh = run_mesh = make_run_mesh(run, spec, training=training)
        self.dtype = compute_dtype(run)
        if training and run.train.float8:
            check_float8(run, self.dtype)
        schedule = None if optimizer else make_schedule(run, run.optimizer.learning_rate)
        averages = optimizer is None and run.optimizer.kind == "schedule_free"  # then evaluation needs its state
        if optimizer and run_mesh.rounds > 1:
            order_L = stored_order(spec.layers, run_mesh.sizes["pipeline"], run_mesh.rounds)
            optimizer = with_layers_in_order(optimizer, order_L)
        optimizer = optimizer or (make_optimizer(run) if training or averages else optax.identity())
        adapters = run.lora.rank > 0
        self.state = plan_state(model_of(run, model), spec, run, run_mesh, optimizer, adapters=adapters)
        self.base = plan_state(model, spec, run, run_mesh, optax.identity()) if adapters else self.state
        self.everywhere = run_mesh.sharding(PartitionSpec())
        shardings, trained = self.state.shardings, self.state.trained
        self.make_state = self.compiled(self.state.make, once=True, out_shardings=shardings)
        self.begin = self.compiled(self.state.begin, donate_argnums=0, out_shardings=shardings)
        loss_sum = make_loss(self.state.graph, run, spec, run_mesh, self.dtype)
        step = make_train_step(
            *(run, loss_sum, run_mesh, optimizer, schedule, metrics or {}, trained),
            in_order=self.state.in_order,
            as_stored=self.state.as_stored,
        )
        self.train_step = self.compiled(step, donate_argnums=0, out_shardings=(shardings, self.everywhere))
        self.eval_step = self.compiled(make_eval_step(loss_sum, run_mesh), out_shardings=self.everywhere)
        self.average = self.compiled(evaluation_params, out_shardings=shardings and trained.of(shardings.params))
        self.base_fingerprint = self.compiled(
            partial(base_fingerprint, order_L=self.state.order_L), out_shardings=self.everywhere
        )
        self.all_finite = self.compiled(_all_finite, out_shardings=self.everywhere)

    def compiled(self, f: Callable[..., Any], *, ordered: bool = False, once: bool = False, **options: Any) -> "OnMesh":
        """`jax.jit(f)`, traced and run on this mesh.

        Arguments:
            f: the function; the layout of this mesh is in force while it is traced.
            ordered: see `MeshLayout`.
            once: it is called once, which isn't worth all of LLVM's optimizations, on a CPU.
            options: of `jax.jit`.
        """
        layout = Layout() if self.mesh.mesh is None else MeshLayout(self.mesh, self.spec, ordered=ordered)
        deterministic = self.run.train.deterministic and jax.default_backend() == "gpu"
        # Of two alike calls of cuDNN's deterministic backward kernel XLA finds one only (openxla/xla#46500). So layers
        # are a loop then, and where they are two loops they do without.
        layout.fused_attention = not (deterministic and self.spec.dense_layers)

        def traced(*arguments: Any) -> Any:
            with use_layout(layout):
                return f(*arguments)

        options["compiler_options"] = self._compiler_options(once, deterministic)
        return OnMesh(self.mesh, jax.jit(traced, **options))

    def _compiler_options(self, once: bool, deterministic: bool) -> dict[str, Any] | None:
        options: dict[str, Any] = {}
        if self.mesh.mesh is not None and jax.default_backend() == "gpu":
            options["xla_disable_hlo_passes"] = PASSES_OFF_ON_GPUS
        if deterministic:
            options["xla_gpu_deterministic_ops"] = True
        if once and jax.default_backend() == "cpu" and _LEVEL not in os.environ.get("XLA_FLAGS", ""):
            options[_LEVEL] = 1
        return options or None

    def compile_train_step(self) -> jax.stages.Compiled:
        """The train step compiled ahead, from abstract arrays."""
        state = self.state.shapes
        if self.state.shardings is not None:
            state = jax.tree.map(_laid, state, self.state.shardings)
        return self.train_step.compile(state, self.mesh.abstract_batch(self.run), self.mesh.to_agree_on(0))


class OnMesh:
    """A compiled function that is called with its mesh set."""

    def __init__(self, mesh: RunMesh, jitted: Any):
        self._mesh = mesh
        self._jitted = jitted

    def __call__(self, *arguments: Any) -> Any:
        with self._mesh.active():
            return self._jitted(*arguments)

    def compile(self, *abstract: Any) -> jax.stages.Compiled:
        """Compile ahead, for arguments of these shapes."""
        with self._mesh.active():
            return self._jitted.lower(*abstract).compile()


def compute_dtype(run: Run) -> Any:
    """The type that activations are computed in."""
    if run.train.compute_dtype != "auto":
        return jnp.dtype(run.train.compute_dtype)
    return jnp.dtype(np.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def check_float8(run: Run, dtype: jnp.dtype) -> None:
    """Refuse to train in float8 where the type of activations or the devices don't allow it.

    Raises:
        UserError: they don't.
    """
    if dtype.itemsize != 2:
        raise UserError(
            "train.float8 = true: needs activations in bfloat16, and train.compute_dtype = "
            f'"{run.train.compute_dtype}" is {dtype.name} on a {jax.default_backend()}; set that to "bfloat16", or '
            "leave float8 out"
        )
    if not float8.is_here():
        raise UserError(
            f"train.float8 = true: needs GPUs of compute capability {float8.LEAST_CAPABILITY} or more; that of "
            f"{jax.devices()[0].device_kind} is {kernels.compute_capability() or 'not known'}; leave it out"
        )


def _laid(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _all_finite(params: Params) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()
