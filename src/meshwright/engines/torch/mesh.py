"""The processes of a run as a mesh: its sizes, whether they fit, and which rows of a batch each process reads."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.config import Run
from meshwright.engines.torch.collectives import TensorGroup
from meshwright.engines.torch.support import AXES
from meshwright.errors import UserError
from meshwright.models.spec import ANY, ModelSpec


@dataclass(frozen=True)
class TorchMesh:
    """The mesh of a run, of which this process is one device; `mesh` is None where it is the only one."""

    sizes: dict[str, int]
    device: torch.device
    accumulate: int
    """Micro-batches of a global batch."""
    mesh: DeviceMesh | None = None
    """With the axes `AXES`."""
    batch_group: dist.ProcessGroup | None = None
    """The processes that have other rows of the batch than this one, and the same share of the tensors."""
    host_group: dist.ProcessGroup | None = None
    """All processes, for what lies on the host."""
    save_group: dist.ProcessGroup | None = None
    """The same for what is saved in the background, beside which nothing else may be sent."""
    tensor: TensorGroup | None = None
    """The processes that share tensors; None: each has them whole."""

    @property
    def copies(self) -> int:
        """How many share the rows of a batch."""
        return self.sizes["data"] * self.sizes["fsdp"]

    @property
    def is_whole(self) -> bool:
        """Whether each process has the whole model: one alone, or replicas."""
        return self.sizes["fsdp"] == self.sizes["tensor"] == 1

    def place(self, axis: str) -> int:
        """Of this process along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def rows(self, batch_size: int) -> np.ndarray:
        """Which rows of a global batch this process reads, in order; all of a tensor group read the same."""
        micro = batch_size // self.accumulate
        share = micro // self.copies
        first = (self.place("data") * self.sizes["fsdp"] + self.place("fsdp")) * share
        return (np.arange(self.accumulate)[:, None] * micro + first + np.arange(share)).reshape(-1)


def local_device() -> torch.device:
    """The device of this process: the first card that it sees, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(run: Run, device: torch.device) -> torch.dtype:
    """The type that activations are computed in."""
    if run.train.compute_dtype != "auto":
        return getattr(torch, run.train.compute_dtype)
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def make_torch_mesh(run: Run, spec: ModelSpec, *, training: bool = True) -> TorchMesh:
    """The mesh that a run asks for, over all processes of the default group; call it in each.

    Arguments:
        run, spec: the run and its architecture.
        training: false where a trained model is only used, by one process.

    Raises:
        UserError: the sizes fit neither the processes nor each other, nor the model or the batch.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    accumulate, device = run.train.batch_size // run.micro_batch_size, local_device()
    if training or processes > 1:
        sizes = mesh_sizes(run, processes)
        check_mesh(run, spec, sizes)
    else:
        sizes, accumulate = dict.fromkeys(AXES, 1), _parts_of_one(run, accumulate)
    if processes == 1:
        return TorchMesh(sizes, device, accumulate)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    ranks = np.arange(processes).reshape(-1, sizes["tensor"])
    groups = [dist.new_group(column.tolist()) for column in ranks.T]  # each is made by all
    batch_group = groups[mesh.get_local_rank("tensor")]
    host_group, save_group = (dist.new_group(backend="gloo") for _ in range(2))
    # Models that Meshwright doesn't know make masks and places of the length that they see.
    cuts_time = spec.family != ANY
    tensor = TensorGroup(mesh.get_group("tensor"), cuts_time=cuts_time) if sizes["tensor"] > 1 else None
    return TorchMesh(sizes, device, accumulate, mesh, batch_group, host_group, save_group, tensor)


def _parts_of_one(run: Run, accumulate: int) -> int:
    """Micro-batches where one process has the rows that several shared, as far as the run file says how many did."""
    given = math.prod(size for axis in AXES if (size := getattr(run.mesh, axis)) != -1)
    left = max(run.launch.processes // given, 1)
    copies = math.prod(left if (size := getattr(run.mesh, axis)) == -1 else size for axis in ("data", "fsdp"))
    parts = accumulate * copies
    return accumulate if run.train.batch_size % parts else parts


def mesh_sizes(run: Run, processes: int) -> dict[str, int]:
    """Processes along each axis, `-1` filled in.

    Raises:
        UserError: the sizes don't make up the processes.
    """
    sizes = {axis: getattr(run.mesh, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (-1, 1)) or "1"
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and processes % given:
        raise UserError(
            f"mesh.{free[0]} = -1: what is left of {processes} processes after {product} = {given} isn't whole; "
            f"choose sizes whose product divides {processes}"
        )
    if not free and given != processes:
        raise UserError(
            f"mesh: {product} = {given} devices, but there are {processes} processes, of which each has one; change a "
            'size, or set launch.kind = "processes" and launch.workers'
        )
    return {axis: processes // given if size == -1 else size for axis, size in sizes.items()}


def check_mesh(run: Run, spec: ModelSpec, sizes: dict[str, int]) -> None:
    """Refuse a mesh that the model or the batch can't be cut along.

    Raises:
        UserError: with the arithmetic.
    """
    micro, copies, tensor = run.micro_batch_size, sizes["data"] * sizes["fsdp"], sizes["tensor"]
    if micro % copies:
        raise UserError(
            f"train.micro_batch_size = {micro}: must be a multiple of mesh data {sizes['data']} x fsdp "
            f"{sizes['fsdp']} = {copies}, which share the sequences; change one of them"
        )
    for key, number in (
        ("model.heads", spec.heads),
        ("model.kv_heads", spec.kv_heads),
        ("model.ffn_width", spec.ffn_width),
        ("train.sequence_length", run.train.sequence_length),
    ):
        if number % tensor:
            raise UserError(
                f"mesh.tensor = {tensor}: must divide {key} = {number} (it leaves {number % tensor}); change one of "
                "them"
            )
    each = -(-spec.vocab_size // tensor)
    if each * (tensor - 1) >= spec.vocab_size:
        raise UserError(
            f"mesh.tensor = {tensor}: each has {each} of the vocabulary of {spec.vocab_size}, and the last has none; "
            "lower it"
        )
