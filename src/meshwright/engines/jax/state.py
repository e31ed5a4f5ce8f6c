"""The state of a run before it exists: its shapes, how it lies on the mesh, and the function that makes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec, SingleDeviceSharding

from meshwright.config import Run
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.pipeline import stored_order
from meshwright.engines.jax.sharding import axes_of, in_memory_order, pad_vocab, padded_vocab, specs_of, state_shardings
from meshwright.engines.jax.step import Params, TrainState
from meshwright.engines.jax.trained import Trained
from meshwright.models.spec import ModelSpec

ModelMaker = Callable[..., nnx.Module]


@dataclass(frozen=True)
class StatePlan:
    """What is known of a training state before it is made."""

    graph: nnx.GraphDef
    make: Callable[[], TrainState]
    """Makes the initial state; to be compiled with `shardings` for its outputs, so that no device holds all of it."""
    begin: Callable[[Params], TrainState]
    """Makes the state that training begins with from parameters, which are padded and lie as `shardings` says; where
    adapters are trained, from those that they are added to."""
    shapes: TrainState
    """Abstract arrays."""
    shardings: TrainState | None
    """How each array lies; None on a single device."""
    axes: dict
    """The names of the axes of each parameter."""
    parameters: int
    """Neither padding of the vocabulary nor adapters counted."""
    trained: Trained
    """Which parameters are trained."""
    trained_parameters: int
    """How many."""
    order_L: np.ndarray | None
    """Which layer lies at each place of the stacked blocks; None: in order."""

    def abstract(self) -> TrainState:
        """The state as arrays without numbers, which know where they would lie."""
        alone = SingleDeviceSharding(jax.devices()[0])
        shardings = self.shardings or jax.tree.map(lambda _: alone, self.shapes)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.shapes,
            shardings,
        )

    def in_order(self, params: Params) -> Params:
        """Parameters with the layers in order."""
        if self.order_L is None:
            return params
        place_L = np.argsort(self.order_L)
        return {**params, "blocks": jax.tree.map(lambda leaf: leaf[place_L], params["blocks"])}

    def as_stored(self, gradients: Params) -> Params:
        """Gradients, in memory as parameters are: XLA would else turn these and their moments round for the update,
        and back."""
        if self.shardings is None:
            return gradients
        return in_memory_order(gradients, self.trained.of(self.shardings.params))


def plan_state(
    model: ModelMaker,
    spec: ModelSpec,
    run: Run,
    run_mesh: RunMesh,
    optimizer: optax.GradientTransformation,
    *,
    adapters: bool = False,
) -> StatePlan:
    """Plan the state of a run; nothing is allocated.

    Arguments:
        model: makes the model from `(spec, rngs=…)`; where layers lie out of order, `order_L=…` is given too.
        spec: the architecture, with its vocabulary.
        run: the seed is read.
        run_mesh: the mesh.
        optimizer: its state is part of the run's.
        adapters: whether the model has adapters, and just these are trained.
    """
    sizes, rounds, more = run_mesh.sizes, run_mesh.rounds, {}
    trained = Trained(adapters=adapters)
    if rounds > 1:
        more["order_L"] = stored_order(spec.layers, sizes["pipeline"], rounds)

    def build() -> nnx.Module:
        return model(spec, rngs=nnx.Rngs(params=run.seed), **more)

    abstract = nnx.eval_shape(build)
    axes = axes_of(nnx.state(abstract, nnx.Param))
    rows = padded_vocab(spec.vocab_size, sizes)

    def initial() -> Params:
        return nnx.to_pure_dict(nnx.state(build(), nnx.Param))

    def make() -> TrainState:
        return started(pad_vocab(initial(), axes, rows))

    def begin(params: Params) -> TrainState:
        return started(trained.put(trained.of(initial()), params) if adapters else params)

    def started(params: Params) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained.of(params)))

    shapes, shardings = jax.eval_shape(make), None
    if run_mesh.mesh is not None:
        laid = jax.tree.map(run_mesh.sharding, specs_of(axes, sizes, spec), is_leaf=_is_spec)
        shardings = state_shardings(shapes, shapes.params, laid, run_mesh.sharding(PartitionSpec()))
    unpadded = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    parameters, in_training = (sum(leaf.size for leaf in jax.tree.leaves(p)) for p in (unpadded, trained.of(unpadded)))
    return StatePlan(
        graph=nnx.graphdef(abstract),
        make=make,
        begin=begin,
        shapes=shapes,
        shardings=shardings,
        axes=axes,
        parameters=parameters - in_training if adapters else parameters,
        trained=trained,
        trained_parameters=in_training,
        order_L=np.array(more["order_L"]) if more else None,
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
