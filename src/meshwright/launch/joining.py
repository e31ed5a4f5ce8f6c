"""How a process becomes one of a run's, whichever the engine: the one place where starting asks which it is.

Imports an engine's framework where that is asked for, and no other's.
"""

from dataclasses import dataclass
from types import ModuleType

from meshwright.config import Run
from meshwright.errors import UserError
from meshwright.launch import devices
from meshwright.launch.addresses import split
from meshwright.launch.group import Group


@dataclass(frozen=True)
class Found:
    """What the framework of a process that has joined sees."""

    framework: str
    """Its name."""
    processes: int
    devices: int
    """Of this process."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""


def prepare(run: Run) -> None:
    """Have this process use the devices that the run file asks for; call it before `join`.

    Raises:
        UserError: see `meshwright.launch.devices.prepare_devices`.
    """
    if run.engine == "jax":
        devices.prepare_devices(run)


def join(run: Run, address: str, rank: int, size: int) -> Group:
    """Become one of the processes of a run.

    Arguments:
        run: a checked run file.
        address: `host:port` where rank 0 listens; with `127.0.0.1` on its machine alone.
        rank: of this process.
        size: how many there are.

    Returns:
        The group. Call `leave` at the end; a process that fails must end by `os._exit`.

    Raises:
        UserError: the framework isn't installed, or the machines aren't alike.
    """
    if run.engine == "jax":
        return devices.join(address, rank, size)
    host, port = split(address)
    return _torch_group().join(port, rank, size, host, on_ray=run.launch.kind == "ray")


def leave(run: Run, group: Group) -> None:
    """Part from the others when all have come to the end."""
    if run.engine == "jax":
        import jax

        jax.distributed.shutdown()
    else:
        _torch_group().leave(group)


def found(run: Run) -> Found:
    """What there is, after `join`."""
    if run.engine == "jax":
        import jax

        return Found("JAX", jax.process_count(), jax.local_device_count(), jax.default_backend())
    processes, platform = _torch_group().found()
    return Found("PyTorch", processes, 1, platform)


def shares_of_cards(run: Run) -> list[dict[str, str]]:
    """What each worker's environment must say, so that it sees its own cards and no other's.

    Arguments:
        run: a run with `launch.kind = "processes"`.

    Returns:
        A dictionary for each worker; empty ones on a CPU.

    Raises:
        UserError: there are too few cards, or they can't be shared equally.
    """
    return devices.shares_of_cards(run) if run.engine == "jax" else _torch_group().shares_of_cards(run.launch.most)


def not_installed(error: ModuleNotFoundError) -> UserError:
    """What to say where the PyTorch engine lacks a package."""
    return UserError(f"engine = \"torch\": needs {error.name}, which isn't installed; pip install 'meshwright[torch]'")


def _torch_group() -> ModuleType:
    try:
        from meshwright.launch import torch_group
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    return torch_group
