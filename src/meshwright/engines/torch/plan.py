"""The model of a run on its mesh: cut, sharded, and filled; and where each of its parameters lies.

Tensor parallelism cuts first, then FSDP2 shards what each process has, a block at a time; replicas of shares are
FSDP2's, too. Where each process has the whole model, it is left as it is, and gradients are added up by the optimizer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.config import Run
from meshwright.engines.torch.any_model import WholeModel
from meshwright.engines.torch.build import skeleton, tensor_shapes, tensors_of_model
from meshwright.engines.torch.copies import Copies
from meshwright.engines.torch.lora import attach, initial
from meshwright.engines.torch.loss import score_chunk
from meshwright.engines.torch.loss_model import LossModel
from meshwright.engines.torch.mesh import TorchMesh, compute_dtype
from meshwright.engines.torch.names import Names
from meshwright.engines.torch.nf4 import check_device, replace
from meshwright.engines.torch.tensor_plans import cut
from meshwright.engines.torch.weights import Weights
from meshwright.hub.any_model import blocks_of
from meshwright.models.spec import ANY, ModelSpec

_PRODUCTS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default),
    torch.ops.meshwright.nf4_product.default,
)


class Placed:
    """A run's model on this process's device.

    Arguments:
        run, spec: the run and its architecture.
        mesh: of all processes.

    Raises:
        UserError: the model can't be made, or not be cut so.
    """

    def __init__(self, run: Run, spec: ModelSpec, mesh: TorchMesh):
        self.mesh, self.dtype = mesh, compute_dtype(run, mesh.device)
        model = skeleton(spec)
        self.names = Names(spec, tensor_shapes(model))
        """How its tensors make up our parameters."""
        self.config = model.config
        is_quantized = run.lora.quantize != "none"
        if is_quantized:
            check_device(mesh.device)
        self.quantized = replace(model, spec, self.names) if is_quantized else {}
        """The maps in 4 bits, by the names of their weights, which `tensors` lacks."""
        if run.lora.rank:
            attach(model, spec, run.lora, self.names)
        if mesh.tensor and mesh.mesh:
            cut(model, mesh.tensor, mesh.mesh["tensor"])
        _, blocks = blocks_of(model)
        regular = not (spec.experts or "expert" in spec.config or model._is_stateful)  # each block does the same anew
        on_gpu = mesh.device.type == "cuda"
        compiled = on_gpu and regular
        for block in blocks:
            _prepare_block(block, run, compiled=compiled)
        kind = WholeModel if spec.family == ANY else LossModel
        memory = torch.cuda.get_device_properties(mesh.device).total_memory if on_gpu else None
        self.module = kind(model, spec, mesh.tensor, score_chunk(memory, spec.vocab_size // mesh.sizes["tensor"]))
        if not mesh.is_whole:
            self._shard(blocks)
        _materialize(model, mesh.device)
        found = tensors_of_model(model)
        self.is_matrix = {n: len(self.names.theirs.get(n, "ab")) >= 2 for n, t in found.items() if t.requires_grad}
        """Of those that are trained, whether each is a matrix in a checkpoint; weight decay is for these."""
        self.copies: Copies | None = None
        if mesh.is_whole and self.dtype != torch.float32:
            self.copies = Copies(model, self.dtype, {name for name, decays in self.is_matrix.items() if decays})
        """What the module computes with, where that isn't what is stored."""
        self.tensors = {**found, **(self.copies.stored if self.copies else {})}
        """The model's tensors as they are stored, by name."""
        self.parameters = {name: t for name, t in self.tensors.items() if t.requires_grad}
        """Those that are trained."""
        self.stored = self.parameters if run.lora.rank else self.tensors
        """What a checkpoint holds."""

    def fill(self, weights: Weights) -> None:
        """Give every tensor of the model its numbers; of each just this process's part is kept.

        Arguments:
            weights: where they come from.
        """
        for name, shape in self.names.theirs.items():
            if name in self.quantized:
                self.put(name, torch.from_numpy(weights.tensor(name, tuple(slice(0, size) for size in shape)).copy()))
                continue
            tensor, index = self.tensors[name], tuple(slice(*cut) for cut in self.mine(name))
            if tuple(tensor.shape) == shape:
                values = weights.tensor(name, index)
            else:  # of several maps in one
                whole = weights.tensor(name, tuple(slice(0, size) for size in shape))
                values = whole.reshape(tuple(tensor.shape))[index]
            own(tensor).copy_(torch.from_numpy(values.copy()))
        self.changed()

    def put(self, name: str, values: torch.Tensor) -> None:
        """Give one map in 4 bits its numbers; beside it the device has no other whole.

        Arguments:
            name: of its weight.
            values: on the host, float32.

        Raises:
            UserError: one isn't finite.
        """
        self.quantized[name].put(values.to(self.mesh.device), name)

    def part(self, name: str) -> torch.Tensor:
        """The part of one of the model's tensors that this process stores; of a map in 4 bits what these stand for."""
        return self.quantized[name].value() if name in self.quantized else own(self.tensors[name])

    def fill_adapters(self, seed: int) -> None:
        """Give adapters the numbers that they start from.

        Arguments:
            seed: the run's.
        """
        for name, tensor in self.parameters.items():
            index = tuple(slice(*cut) for cut in self.mine(name))
            own(tensor).copy_(torch.from_numpy(initial(name, tuple(tensor.shape), seed)[index]))
        self.changed()

    def changed(self) -> None:
        """To be called when stored tensors have changed otherwise than by updates: the module computes with them from
        now on."""
        if self.copies:
            self.copies.refresh()

    def mine(self, name: str) -> list[tuple[int, int]]:
        """Which places of each axis this process holds."""
        if name in self.quantized:
            return [(0, size) for size in self.quantized[name].shape]
        tensor = self.tensors[name]
        cuts = [(0, size) for size in tensor.shape]
        if not isinstance(tensor, DTensor) or self.mesh.mesh is None:
            return cuts
        axes = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
        for axis in ("tensor", "fsdp"):  # in the order in which they were cut
            placement = axes.get(axis)
            if placement is None or not hasattr(placement, "dim"):
                continue
            first, last = cuts[placement.dim]
            each = -(-(last - first) // self.mesh.sizes[axis])
            start = first + each * self.mesh.place(axis)
            cuts[placement.dim] = (min(start, last), min(start + each, last))
        return cuts

    def _shard(self, blocks: list[nn.Module]) -> None:
        assert self.mesh.mesh is not None
        kept = None if self.dtype == torch.float32 else self.dtype
        policy = MixedPrecisionPolicy(param_dtype=kept, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*blocks, self.module):
            # Where nothing is shared out, what was made for the forward pass serves the backward pass, too.
            again = self.mesh.sizes["fsdp"] > 1 and module is not self.module
            place = self.mesh.mesh["data", "fsdp"]
            shard: Any = fully_shard(module, mesh=place, mp_policy=policy, reshard_after_forward=again)
            # Sums are wanted: the loss is divided by the tokens of the whole batch.
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)

    @contextmanager
    def used(self) -> Iterator[LossModel]:
        """The module to call without gradients; what was gathered for it is given back."""
        try:
            with torch.no_grad():
                yield self.module
        finally:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether the processes of a tensor group have parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    return "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process stores."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _prepare_block(block: Any, run: Run, *, compiled: bool) -> None:
    if run.train.remat != "none":
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        more: dict[str, Any] = {"context_fn": contexts} if run.train.remat == "products" else {}
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=run.model.dropout > 0, **more
        )
    if compiled:
        block.forward = torch.compile(block.forward)


def _keep_products(_context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _materialize(model: Any, device: torch.device) -> None:
    """Give parameters memory, which parts what is tied and empties buffers: so these are put back."""
    first: dict[int, str] = {}
    there = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    buffers = {name: there[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}
    named = model.named_parameters(remove_duplicate=False)
    tied = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    model.to_empty(device=device)
    for name, source in tied.items():
        if name != source:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(source))
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
