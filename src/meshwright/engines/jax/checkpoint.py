"""Writing and reading the whole state of the JAX engine with Orbax.

On disk the state is a flat dictionary from the path of each array to the array, so a checkpoint can be read without
this package, and restores onto whatever mesh there is. Each process writes what its devices hold. Two things of the
mesh that wrote it remain: the order of the layers, written beside, and zeros that pad the vocabulary. Of parameters,
those that are trained are in it.
"""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshwright.engines.jax.layer_order import is_reordered
from meshwright.engines.jax.state import StatePlan
from meshwright.engines.jax.step import TrainState
from meshwright.errors import UserError

_FOLDER = "state"
_ORDER = "order_of_layers"
_MARGIN = 1.25  # of room for a copy: free memory lies in pieces


def save_state(
    folder: Path, state: TrainState, plan: StatePlan, *, apart: bool = False, twice: bool = False
) -> Callable[[], None]:
    """Copy the state, then write it in the background.

    An accelerator copies its own memory a hundred times as fast as it sends it to the host: where one process has room
    for that, training waits for no more. Else it waits until the state is on the host.

    Arguments:
        folder: an existing, empty folder; the same one in every process, unless they are apart.
        state: may be donated to the next step as soon as this returns.
        plan: the state's.
        apart: whether each process has a folder of its own. The files of all of them, put into one folder, are the
            state then; of a name that several have, any one will do.
        twice: whether the devices have room for a copy (`fits_twice`).

    Returns:
        A function that waits until the files are on disk, those of the other processes too, and raises what went wrong.
    """
    arrays = {**_flatten(_trained(state, plan)), _ORDER: _order(plan)}
    if twice and (copies := _copied(arrays)):
        return _write_in_thread(folder, copies)
    # OCDBT's files of all processes must be merged, in one folder; without it each shard is a file.
    alone = {"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=None)}
    alone = alone if apart and jax.process_count() > 1 else {}
    # Made in the background, the first process's folder would be a sign for the others to write before theirs is there.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=not alone)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=not alone, **alone)
    checkpointer = ocp.AsyncCheckpointer(handler, async_options=options, **alone)
    checkpointer.save(folder.absolute() / _FOLDER, args=ocp.args.PyTreeSave(arrays))

    def finish() -> None:
        with _os_errors(folder), closing(checkpointer):
            checkpointer.wait_until_finished()

    return finish


def fits_twice(state: TrainState, plan: StatePlan) -> bool:
    """Whether one process has all, and each device has room for a second copy of its share of what is trained, beside
    all that it ever held.

    Arguments:
        state: of a run that has trained; no copy of it has been made yet.
        plan: the state's.
    """
    needed: Counter[jax.Device] = Counter()
    for leaf in _flatten(_trained(state, plan)).values():
        needed.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    if jax.process_count() > 1:
        return False
    for device, size in needed.items():
        memory = device.memory_stats() or {}
        if not memory.get("bytes_limit") or _MARGIN * size > memory["bytes_limit"] - memory["peak_bytes_in_use"]:
            return False
    return True


def _copied(arrays: dict[str, Any]) -> dict[str, Any] | None:
    """None: there was no room after all."""
    on_devices = {name: leaf for name, leaf in arrays.items() if isinstance(leaf, jax.Array)}
    lie = {name: leaf.sharding for name, leaf in on_devices.items()}
    try:
        return arrays | jax.block_until_ready(jax.jit(_copies, out_shardings=lie)(on_devices))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(leaf) for name, leaf in arrays.items()}


def _write_in_thread(folder: Path, arrays: dict[str, Any]) -> Callable[[], None]:
    def write() -> None:
        with _os_errors(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute() / _FOLDER, args=ocp.args.PyTreeSave(arrays))
        arrays.clear()  # the copies' memory is free again

    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    writing = pool.submit(write)
    pool.shutdown(wait=False)
    return writing.result


@contextmanager
def _os_errors(folder: Path) -> Iterator[None]:
    # TensorStore's are of type ValueError, with the number in their words.
    try:
        yield
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
        raise


def restore_state(folder: Path, like: TrainState, plan: StatePlan) -> TrainState:
    """Read a state back, onto the devices and in the layout of `like`; arrays that `like` lacks are left unread.

    What isn't trained is that of `like`.

    Raises:
        UserError: the folder holds the state of another model or optimizer.
        Exception: whatever Orbax raises for a folder that is damaged.
    """
    base, like = like.params, _trained(like, plan)
    wanted = {name: ocp.utils.to_shape_dtype_struct(leaf) for name, leaf in _flatten(like).items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.metadata(folder.absolute() / _FOLDER).item_metadata.tree
        _check_arrays(folder, stored, wanted, _paddable(like, plan))
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        lenient = {name: _lenient(arg) for name, arg in restore_args.items()}
        items: dict[str, Any] = {**wanted, _ORDER: np.zeros_like(_order(plan))}
        lenient[_ORDER] = ocp.RestoreArgs(restore_type=np.ndarray)
        args = ocp.args.PyTreeRestore(items, restore_args=lenient, partial_restore=True)
        arrays = checkpointer.restore(folder.absolute() / _FOLDER, args=args)
    state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    state = _reordered(state, arrays[_ORDER], _order(plan))
    return state._replace(params=plan.trained.put(state.params, base))


def _trained(state: TrainState, plan: StatePlan) -> TrainState:
    return state._replace(params=plan.trained.of(state.params))


def _order(plan: StatePlan) -> np.ndarray:
    layers = jax.tree.leaves(plan.shapes.params["blocks"])[0].shape[0] if "blocks" in plan.shapes.params else 0
    return np.arange(layers) if plan.order_L is None else plan.order_L


def _reordered(state: TrainState, theirs_L: np.ndarray, ours_L: np.ndarray) -> TrainState:
    if np.array_equal(theirs_L, ours_L):
        return state
    source_L = np.argsort(theirs_L)[ours_L]

    def reorder(path: tuple, leaf: jax.Array) -> jax.Array:
        if not is_reordered(path):
            return leaf
        return jax.jit(lambda x: x[source_L], out_shardings=leaf.sharding, donate_argnums=0)(leaf)

    return jax.tree_util.tree_map_with_path(reorder, state)


def _lenient(arg: Any) -> Any:
    # Where the vocabulary was padded to another size, zeros are added or left out.
    return dataclasses.replace(arg, strict=False) if isinstance(arg, ocp.ArrayRestoreArgs) else arg


def _paddable(like: TrainState, plan: StatePlan) -> dict[str, int]:
    """Of each array with an axis of the vocabulary, which axis that is."""
    axes, _ = jax.tree_util.tree_flatten_with_path(plan.axes, is_leaf=lambda value: isinstance(value, tuple))
    suffixes = {_name(path): names.index("vocab") for path, names in axes if "vocab" in names}
    return {
        name: axis for name in _flatten(like) for suffix, axis in suffixes.items() if f".{name}".endswith(f".{suffix}")
    }


def _check_arrays(
    folder: Path, stored: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct], paddable: dict[str, int]
) -> None:
    for name, array in wanted.items():
        theirs = tuple(stored[name].shape) if name in stored else None
        ours, axis = array.shape, paddable.get(name)
        if axis is not None and theirs is not None and len(theirs) == len(ours):
            theirs = (*theirs[:axis], ours[axis], *theirs[axis + 1 :])  # the vocabulary itself is part of the identity
        if theirs != ours:
            found = f"shape {theirs}" if theirs is not None else "no such array"
            part = "optimizer" if name.startswith("optimizer") else "model"
            raise UserError(
                f"{folder}: {name}: {found} in the checkpoint, shape {ours} in this run; "
                f"give the {part} that the checkpoint was made with"
            )


def _flatten(state: TrainState) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
