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
from meshwright.errors import UserError

_FOLDER = "state"


def save_state(folder: Path, state: TrainState) -> Callable[[], None]:
    """Copy the state off the devices, then write it in the background.

    Arguments:
        folder: an existing, empty folder.
        state: may be donated to the next step as soon as this returns.

    Returns:
        A function that waits until the files are on disk, and raises what went wrong.
    """
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(folder.absolute() / _FOLDER, args=ocp.args.PyTreeSave(_flatten(state)))

    def finish() -> None:
        checkpointer.wait_until_finished()
        checkpointer.close()

    return finish


def restore_state(folder: Path, like: TrainState) -> TrainState:
    """Read a state back, onto the devices and in the layout of `like`; arrays that `like` lacks are left unread.

    Raises:
        UserError: the folder holds the state of another model or optimizer.
        Exception: whatever Orbax raises for a folder that is damaged.
    """
    wanted = {name: ocp.utils.to_shape_dtype_struct(leaf) for name, leaf in _flatten(like).items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        _check_arrays(folder, checkpointer.metadata(folder.absolute() / _FOLDER).item_metadata.tree, wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
        arrays = checkpointer.restore(folder.absolute() / _FOLDER, args=args)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _check_arrays(folder: Path, stored: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    for name, array in wanted.items():
        if name not in stored or tuple(stored[name].shape) != array.shape:
            found = f"shape {tuple(stored[name].shape)}" if name in stored else "no such array"
            part = "optimizer" if name.startswith("optimizer") else "model"
            raise UserError(
                f"{folder}: {name}: {found} in the checkpoint, shape {array.shape} in this run; "
                f"give the {part} that the checkpoint was made with"
            )


def _flatten(state: TrainState) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
