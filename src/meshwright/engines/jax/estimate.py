"""What a run takes, from shapes alone: parameters, bytes on a device, operations a token. Nothing is allocated.

Exact: parameters, gradients, optimizer state. An estimate: what the forward pass keeps for the backward one, and what
both work with. XLA may keep more, where it computes ahead of need, or less, where it computes a thing twice.

Sizes: N tokens of a micro-batch on a device, T sequence length, D width, H heads, K key-value heads, C width of a
head's queries and keys, E of its values, F feed-forward width, V vocabulary, J experts of a token; s bytes of a number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.config import Run
from meshwright.engines.jax.mesh import RunMesh, check_mesh, mesh_sizes
from meshwright.engines.jax.rules import ACTIVATIONS, GATHERED
from meshwright.engines.jax.sharding import specs_of
from meshwright.engines.jax.state import StatePlan
from meshwright.engines.jax.step import CHUNK
from meshwright.models.decoder import active_parameter_count
from meshwright.models.moe import expert_room
from meshwright.models.spec import ModelSpec

_FLOAT32 = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, by what they hold."""

    parameters: int
    gradients: int
    """Float32; twice where micro-batches come one at a time: the sum, and those of the one at hand."""
    optimizer: int
    activations: int
    """What all layers keep from the forward pass for the backward one."""
    kernels: int
    """Parameters in the form in which they are multiplied: gathered along `fsdp`, or several joined into one."""
    head: int
    """The residual stream at the head, its gradient, and the sum of the head's gradient over chunks of tokens."""
    work: int
    """The backward pass of one layer, or a chunk's scores and their gradient: whichever is more."""

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def abstract_mesh(run: Run, spec: ModelSpec, devices: int) -> RunMesh:
    """As `make_run_mesh`, over devices that need not be there; good for shapes and shardings alone.

    Arguments:
        run: a checked run file.
        spec: the architecture.
        devices: how many there are to be.

    Raises:
        UserError: the mesh fits neither the devices nor the model or the batch.
    """
    sizes = mesh_sizes(run, devices)
    check_mesh(run, spec, sizes)
    accumulate = run.train.batch_size // run.micro_batch_size
    if devices == 1:
        return RunMesh(sizes, None, accumulate)
    shape, names = tuple(sizes.values()), tuple(sizes)
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return RunMesh(sizes, cast(Mesh, mesh), accumulate)


def flops_per_token(spec: ModelSpec, sequence_length: int) -> int:
    """Floating-point operations of training on one token, by the formula `6 P + 12 L H Q T`.

    The convention of PaLM (Chowdhery et al., 2022, appendix B): a multiplication and an addition for each parameter,
    once forward and twice backward; and the two products of attention, over the whole square of scores although half
    of it is masked. Recomputation under `train.remat` isn't counted.

    P are the parameters that take part in the computation of a token, but for the tables that are looked up and not
    multiplied: the position table, and the embedding where the head isn't tied to it. L layers, H heads, Q = (C + E) / 2
    the mean width of a head's keys and values, T the sequence length.

    Arguments:
        spec: the architecture, with its vocabulary.
        sequence_length: tokens of a sequence.
    """
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    if spec.positions == "learned":
        looked_up += spec.context_length * spec.width
    key_width, value_width = _head_widths(spec)
    attention = 6 * spec.layers * spec.heads * (key_width + value_width) * sequence_length
    return 6 * (active_parameter_count(spec) - looked_up) + attention


def _head_widths(spec: ModelSpec) -> tuple[int, int]:
    if spec.attention == "latent":
        return spec.head_width + spec.rotary_width, spec.value_width or spec.head_width
    return spec.head_width, spec.head_width


def bytes_of(arrays: Any, shardings: Any = None) -> int:
    """Bytes that abstract arrays take on one device.

    Arguments:
        arrays: any tree of them.
        shardings: how each lies; None: whole.
    """
    return sum(leaf.dtype.itemsize * size for leaf, size in _sizes(arrays, shardings))


def count_of(arrays: Any, shardings: Any = None) -> int:
    """Numbers on one device; arguments as in `bytes_of`."""
    return sum(size for _, size in _sizes(arrays, shardings))


def _sizes(arrays: Any, shardings: Any) -> Iterator[tuple[Any, int]]:
    leaves = jax.tree.leaves(arrays)
    if shardings is None:
        yield from ((leaf, leaf.size) for leaf in leaves)
        return
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        yield leaf, math.prod(sharding.shard_shape(leaf.shape))


def estimate(run: Run, spec: ModelSpec, run_mesh: RunMesh, state: StatePlan, dtype: jnp.dtype) -> Estimate:
    """Bytes that training takes on one device.

    Arguments:
        run: of it the sequence length, the size of micro-batches, `train.remat` and the pipeline's rounds matter.
        spec: the architecture, with its vocabulary.
        run_mesh: the mesh, of devices or abstract.
        state: the plan of the state on that mesh.
        dtype: the type that activations are computed in.
    """
    share = Share.of(run, spec, run_mesh.sizes, dtype)
    shapes, shardings = state.shapes, state.shardings
    parameters = bytes_of(shapes.params, shardings and shardings.params)
    optimizer = bytes_of((shapes.step, shapes.optimizer), shardings and (shardings.step, shardings.optimizer))
    gradients = _FLOAT32 * count_of(shapes.params, shardings and shardings.params)
    if run_mesh.accumulate > 1 and share.stages == 1:
        gradients *= 2
    kept = share.tokens * layer_bytes(spec, share, run.train.remat)
    whole = share.tokens * layer_bytes(spec, share, "none")
    layer_kernels, other_kernels = _kernels(spec, share, run_mesh.sizes, state)
    if share.stages == 1:
        activations = spec.layers * kept
        kernels = other_kernels + (spec.layers if run.train.remat == "none" else 1) * layer_kernels
        layer_work = whole
    else:
        layers, ticks = _ticks(run, spec, run_mesh)
        stream = share.tokens * share.stream
        activations = (ticks + 2 * run_mesh.accumulate) * stream
        kernels = other_kernels + layers * layer_kernels
        layer_work = layers * kept + whole
    head, chunk_work = _head_bytes(run, spec, run_mesh, share)
    return Estimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=math.ceil(activations),
        kernels=math.ceil(kernels),
        head=math.ceil(head),
        work=math.ceil(max(layer_work, chunk_work)),
    )
