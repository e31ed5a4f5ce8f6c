"""Writing and reading the whole state with PyTorch's distributed checkpoint (DCP): each process its own part.

On disk it is a flat dictionary from names to tensors, of which each has the shape of the whole, so that it is read on
whatever mesh there is. `step` counts the updates.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from meshwright.engines.torch.optimizer import Optimizer
from meshwright.engines.torch.plan import Placed, own
from meshwright.errors import UserError

# DCP says so each time, though it is told that there is one process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

_FOLDER = "state"
_STEP = "step"
_MARGIN = 1.5  # of room for a copy: what comes beside it may need some, too


def save_state(folder: Path, placed: Placed, optimizer: Optimizer) -> Callable[[], None]:
    """Copy the state off the device, then write it in the background.

    Arguments:
        folder: an existing, empty folder; the same one in every process.
        placed, optimizer: may change as soon as this returns.

    Returns:
        A function that waits until the files are on disk, those of the other processes too, and raises what went wrong.
    """
    state = {**_named(placed, optimizer), _STEP: torch.tensor(optimizer.count)}
    writer = dcp.FileSystemWriter(str(folder / _FOLDER), single_file_per_rank=True, sync_files=True)
    if placed.mesh.mesh is None:
        return _in_thread(state, writer)
    dist.barrier(group=placed.mesh.host_group)  # the folder is another process's to make, and DCP would make it
    future: Any = dcp.async_save(
        state,
        storage_writer=writer,
        process_group=placed.mesh.save_group,
        async_stager=BlockingAsyncStager(cache_staged_state_dict=False),
    )
    return partial(_wait, future)


def restore_state(folder: Path, placed: Placed, optimizer: Optimizer | None, *, base: bool = False) -> None:
    """Read a state back in place; nothing of it changes before all has been read.

    Arguments:
        folder: that it was written to.
        placed: the model.
        optimizer: None: its state isn't read.
        base: whether to read the model without its adapters, as a run has it that trains no adapters.

    Raises:
        UserError: the folder holds the state of another model or optimizer.
        Exception: whatever DCP raises for a folder that is damaged.
    """
    reader = dcp.FileSystemReader(str(folder / _FOLDER))
    wanted = _named(placed, optimizer)
    if base:
        wanted = {f"model.{name}": _of_base(placed, name) for name in placed.names.theirs}
    _check(folder, wanted, reader.read_metadata().state_dict_metadata)
    try:
        read: dict[str, Any] = {name: _like(tensor) for name, tensor in wanted.items()}
    except torch.OutOfMemoryError:
        raise UserError(
            f"{folder}: to take it up, each card needs room for its share twice, and one hasn't; raise mesh.fsdp"
        ) from None
    read[_STEP] = torch.tensor(0)
    group, alone = placed.mesh.host_group, placed.mesh.mesh is None
    with _as_exceptions():
        dcp.load(read, storage_reader=reader, process_group=group, no_dist=alone)
    with torch.no_grad():
        for name, tensor in wanted.items():
            if tensor.is_meta:
                placed.put(name.removeprefix("model."), read.pop(name))
            else:
                own(tensor).copy_(own(read[name]))
    placed.changed()
    if optimizer is not None:
        optimizer.set_count(int(read[_STEP]))


def _named(placed: Placed, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor.detach() for name, tensor in placed.stored.items()}
    for moment, parts in (optimizer.state if optimizer else {}).items():
        for name, part in parts.items():
            found[f"optimizer.{moment}.{name}"] = _laid_as(placed.parameters[name], part)
    return found


def _of_base(placed: Placed, name: str) -> torch.Tensor:
    """One of the model's tensors; of a map in 4 bits just the shape that it had before."""
    if name in placed.quantized:
        return torch.empty(placed.quantized[name].shape, device="meta")
    return placed.tensors[name].detach()


def _laid_as(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A process's part of something that lies as a tensor does."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):  # on the host, where it needs no room beside the state that is there
        return torch.empty_like(tensor, device="cpu")
    return _laid_as(tensor, torch.empty_like(own(tensor)))


def _check(folder: Path, wanted: dict[str, torch.Tensor], stored: dict[str, Any]) -> None:
    for name, tensor in wanted.items():
        theirs = tuple(stored[name].size) if name in stored else None
        if theirs != (ours := tuple(tensor.shape)):
            found = f"shape {theirs}" if theirs is not None else "no such tensor"
            part = "optimizer" if name.startswith("optimizer") else "model"
            raise UserError(
                f"{folder}: {name}: {found} in the checkpoint, shape {ours} in this run; give the {part} that the "
                "checkpoint was made with"
            )


def _in_thread(state: dict[str, torch.Tensor], writer: Any) -> Callable[[], None]:
    # A card copies its own memory a hundred times as fast as it sends it to the host: where there is room, training
    # waits for that alone.
    copies = _copied_on_card(state)
    made = torch.cuda.current_stream().record_event() if copies else None
    copies = copies or {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

    def write() -> None:
        if made is None:
            dcp.save(copies, storage_writer=writer, no_dist=True)
            return
        stream = torch.cuda.Stream()
        stream.wait_event(made)
        with torch.cuda.stream(stream):
            for name in copies:
                copies[name] = copies[name].to("cpu")
        dcp.save(copies, storage_writer=writer, no_dist=True)

    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = pool.submit(write)
    pool.shutdown(wait=False)
    return partial(_wait, future)


def _copied_on_card(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Nothing: there is no card, or no room for a copy."""
    needed = sum(tensor.nbytes for tensor in state.values() if tensor.is_cuda)
    if not needed or _MARGIN * needed > torch.cuda.mem_get_info()[0]:
        return {}
    try:
        return {name: tensor.clone() for name, tensor in state.items()}
    except torch.OutOfMemoryError:
        return {}


def _wait(future: Any) -> None:
    with _as_exceptions():
        future.result()


@contextmanager
def _as_exceptions() -> Iterator[None]:
    # DCP's own isn't an `Exception`, and would pass by all that handle one.
    try:
        yield
    except CheckpointException as error:
        first: Any = next(iter(error.failures.values()), (error,))[0]
        if isinstance(first, OSError):
            raise first from error
        raise RuntimeError(f"{type(first).__name__}: {first}") from error
