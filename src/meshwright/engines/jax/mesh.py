"""The mesh of a run: its sizes, whether they fit, and how a batch lies on it."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.config import Run
from meshwright.config_train import MESH_AXES
from meshwright.data.examples import Batch
from meshwright.engines.jax.ring import zigzag_order
from meshwright.engines.jax.rules import ACTIVATIONS
from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec

_BATCH = PartitionSpec(None, ACTIVATIONS["batch"], ACTIVATIONS["time"])


def mesh_sizes(run: Run, devices: int) -> dict[str, int]:
    """Devices along each axis of the mesh, `-1` filled in.

    Raises:
        UserError: the sizes don't make up the devices.
    """
    sizes = {name: getattr(run.mesh, name) for name in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (-1, 1)) or "1"
    free = [name for name, size in sizes.items() if size == -1]
    if free and devices % given:
        raise UserError(
            f"mesh.{free[0]} = -1: what is left of {devices} devices after {product} = {given} isn't whole; "
            f"choose sizes whose product divides {devices}"
        )
    if not free and given != devices:
        raise UserError(
            f"mesh: {product} = {given} devices, but there are {devices}; change a size, or set one to -1 (what is "
            "left)"
        )
    return {name: devices // given if size == -1 else size for name, size in sizes.items()}


def check_mesh(run: Run, spec: ModelSpec, sizes: dict[str, int]) -> None:
    """Refuse a mesh that the model or the batch can't be cut along.

    Raises:
        UserError: with the arithmetic.
    """
    micro, copies = run.micro_batch_size, sizes["data"] * sizes["fsdp"] * sizes["expert"]
    stages, rounds = sizes["pipeline"], run.mesh.pipeline_rounds
    if micro % copies:
        raise UserError(
            f"train.micro_batch_size = {micro}: must be a multiple of mesh data {sizes['data']} x fsdp "
            f"{sizes['fsdp']} x expert {sizes['expert']} = {copies}, which share the sequences; change one of them"
        )
    if sizes["expert"] > 1 and not spec.experts:
        raise UserError(f"mesh.expert = {sizes['expert']}: the model has no experts; use data or fsdp in its place")
    if run.train.sequence_length % _time_shares(sizes):
        raise UserError(
            f"train.sequence_length = {run.train.sequence_length}: must be a multiple of 2 x mesh.context = "
            f"{_time_shares(sizes)}; change one of them"
        )
    if stages > 1 and spec.dense_layers:
        raise UserError(
            f"mesh.pipeline = {stages}: each stage needs the same layers, but the first {spec.dense_layers} of "
            f"{spec.layers} have one feed-forward part and the other {spec.layers - spec.dense_layers} have experts; "
            "set mesh.pipeline = 1 and use expert, fsdp or tensor in its place, or model.dense_layers = 0"
        )
    for axis, what, number in (
        ("tensor", "model.heads", spec.heads),
        ("tensor", "model.ffn_width", spec.ffn_width),
        ("tensor", "model.dense_ffn_width", spec.dense_ffn_width if spec.dense_layers else 0),
        ("fsdp", "model.width", spec.width),
        ("fsdp", "model.kv_latent", spec.kv_latent),
        ("fsdp", "model.query_latent", spec.query_latent),
        ("expert", "model.experts", spec.experts),
        ("pipeline", "model.layers", spec.layers),
    ):
        if number % sizes[axis]:
            raise UserError(
                f"mesh.{axis} = {sizes[axis]}: must divide {what} = {number} (it leaves {number % sizes[axis]}); "
                "change one of them"
            )
    if spec.layers % (stages * rounds):
        raise UserError(
            f"mesh.pipeline_rounds = {rounds}: {stages} stages x {rounds} rounds = {stages * rounds} must divide "
            f"model.layers = {spec.layers}; change one of them"
        )
    many = run.train.batch_size // micro
    if rounds > 1 and many < stages:
        raise UserError(
            f"mesh.pipeline_rounds = {rounds}: needs at least as many micro-batches as stages; there are {many} "
            f"(train.batch_size {run.train.batch_size} / micro_batch_size {micro}) for {stages} stages; make "
            "micro_batch_size smaller"
        )


def masks_documents(run: Run) -> bool:
    """Whether the batches of a run say where documents lie."""
    return run.data.packing == "packed" and run.data.document_mask


def _time_shares(sizes: dict[str, int]) -> int:
    return 2 * sizes["context"] if sizes["context"] > 1 else 1


@dataclass(frozen=True)
class RunMesh:
    """The devices of a run in their order; `mesh` is None on a single device, where nothing is cut."""

    sizes: dict[str, int]
    mesh: jax.sharding.Mesh | None
    accumulate: int
    """Micro-batches of a global batch."""
    rounds: int = 1
    """How often a micro-batch goes round the stages of the pipeline."""

    def active(self) -> AbstractContextManager:
        """Where functions of this mesh are compiled and called."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """Of an array that lies on this mesh as a spec says."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def loss_shares(self, run: Run) -> tuple[int, int]:
        """Into how many the examples of a micro-batch, and time, are cut where the loss is computed."""
        many = math.prod(self.sizes[axis] for axis in ACTIVATIONS["batch"])
        long = math.prod(self.sizes[axis] for axis in ACTIVATIONS["loss_time"])
        return many, long if run.train.sequence_length % long == 0 else self.sizes["context"]

    def rows(self, batch_size: int) -> np.ndarray:
        """Which rows of a global batch the devices of this process need, in order."""
        micro = batch_size // self.accumulate
        mine = self._rows_of_micro_batch(micro)
        return (np.arange(self.accumulate)[:, None] * micro + mine).reshape(-1)

    def place(self, batch: Batch) -> Batch:
        """This process's rows of a global batch, `[R, T]`, as arrays of the whole mesh, `[A, M, T]`.

        A is the number of micro-batches and M their size. Along the context axis, columns go into zig-zag order.
        """
        by_micro_batch = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, x.shape[-1]), batch)
        if self.mesh is None:
            return by_micro_batch
        if self.sizes["context"] > 1:
            order_T = zigzag_order(batch.inputs_BT.shape[1], self.sizes["context"])
            by_micro_batch = jax.tree.map(lambda x: x[..., order_T], by_micro_batch)
        return jax.tree.map(partial(self._place, NamedSharding(self.mesh, _BATCH)), by_micro_batch)

    def to_agree_on(self, number: int) -> jax.Array | None:
        """A number of this process beside those of the others, `[devices]`; None where there are no others."""
        if self.mesh is None or jax.process_count() == 1:
            return None
        each_its_own = NamedSharding(self.mesh, PartitionSpec(MESH_AXES))
        return jax.make_array_from_callback((self.mesh.size,), each_its_own, lambda _: np.full(1, number, np.int32))

    def abstract_batch(self, run: Run) -> Batch:
        """The shapes of what `place` gives."""
        shape = (self.accumulate, run.micro_batch_size, run.train.sequence_length)
        sharding = self.sharding(_BATCH)
        whole = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        documents = whole if masks_documents(run) else None
        return Batch(whole, whole, whole.update(dtype=np.float32), documents, documents)  # type: ignore[arg-type]

    def _place(self, sharding: NamedSharding, x_ART: np.ndarray) -> jax.Array:
        shares = math.prod(self.sizes[axis] for axis in ACTIVATIONS["batch"])
        micro = x_ART.shape[1] * shares // self._shares_here(shares)
        mine = self._rows_of_micro_batch(micro)

        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[1].indices(micro)
            start = int(np.searchsorted(mine, first))
            return x_ART[index[0], start : start + last - first, index[2]]

        return jax.make_array_from_callback((x_ART.shape[0], micro, x_ART.shape[2]), sharding, shard)

    def _shares_here(self, shares: int) -> int:
        return len(self._rows_of_micro_batch(shares))

    def _rows_of_micro_batch(self, micro: int) -> np.ndarray:
        if self.mesh is None:
            return np.arange(micro)
        sharding = NamedSharding(self.mesh, PartitionSpec(ACTIVATIONS["batch"]))
        cuts = sharding.addressable_devices_indices_map((micro,)).values()
        return np.unique(np.concatenate([np.arange(micro)[cut] for cut in cuts]))


def make_run_mesh(run: Run, spec: ModelSpec, *, training: bool = True) -> RunMesh:
    """The mesh that a run asks for, over all devices of all processes.

    Arguments:
        run, spec: the run and its architecture.
        training: false where a trained model is only used: on other devices than it was trained on, that may be just
            one of them.

    Raises:
        UserError: the sizes fit neither the devices nor each other, nor the model or the batch.
    """
    try:
        sizes = mesh_sizes(run, jax.device_count())
        check_mesh(run, spec, sizes)
    except UserError:
        if training:
            raise
        return RunMesh(dict.fromkeys(MESH_AXES, 1), None, run.train.batch_size // run.micro_batch_size)
    accumulate = run.train.batch_size // run.micro_batch_size
    if jax.device_count() == 1:
        return RunMesh(sizes, None, accumulate)
    shape, names = tuple(sizes.values()), tuple(sizes)
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return RunMesh(sizes, mesh, accumulate, run.mesh.pipeline_rounds)
