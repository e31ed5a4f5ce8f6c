"""Writing and reading the whole state of the JAX engine with Orbax.

On disk the state is a flat dictionary from the path of each array to the array, so a checkpoint can be read without
this package, and restores whatever the devices are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshwright.engines.jax.step import TrainState

_FOLDER = "state"


def save_state(folder: Path, state: TrainState) -> Callable[[], None]:
    """Copy the state off the devices, then write it in the background.

    Arguments:
        folder: an existing, empty folder.
        state: may be donated to the next step as soon as this returns.

    Returns:
        A function that waits until the files are on disk, and raises what went wrong.
    """
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    checkpointer.save(folder.absolute() / _FOLDER, args=ocp.args.StandardSave(_flatten(state)))

    def finish() -> None:
        checkpointer.wait_until_finished()
        checkpointer.close()

    return finish


def restore_state(folder: Path, like: TrainState) -> TrainState:
    """Read a state back, onto the devices and in the layout of `like`.

    Raises:
        Exception: whatever Orbax raises for a folder that is damaged or holds other arrays.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flatten(like))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(folder.absolute() / _FOLDER, args=ocp.args.StandardRestore(abstract))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _flatten(like)])


def _flatten(state: TrainState) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
