"""A Ray cluster to work on: the one that is there, or one of this machine for as long as it is needed."""

import logging
import os
import signal
import site
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.cores import core_count
from meshwright.errors import UserError

_REACH_SECONDS = 10.0
_HERE = ("", "local")
_OF_OWN_CLUSTER = {
    # No word to Ray's makers of what a user trains on.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its processes would give way to any other of this machine.
    "RAY_worker_niceness": "0",
    # A process for each processor, most of which no actor would ever use.
    "RAY_prestart_worker_first_driver": "0",
}
# A job may have a PYTHONPATH of its own.
_OF_CONNECTION = {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
_own = False  # whether the cluster that is connected to was started here


@contextmanager
def ray_cluster(address: str, key: str, cpus: int = 0) -> Iterator[Any]:
    """Be connected to a cluster; a connection that is there already is used, and kept.

    Arguments:
        address: as `launch.address`; empty: `RAY_ADDRESS`, and without that a cluster of this machine, which is started
            and stopped here.
        key: the run file's key and value that ask for Ray, for error messages.
        cpus: how many a cluster of this machine must say that it has, whether or not it does.

    Returns:
        The module `ray`.

    Raises:
        UserError: Ray isn't installed, or nothing answers at the address.
    """
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise UserError(f"{key}: needs {error.name}; pip install 'meshwright[ray]'") from None
    global _own
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS", "")
    settings = _OF_OWN_CLUSTER if address in _HERE else _OF_CONNECTION
    with set_unless_given(settings), _quiet(ray):
        try:
            with _signals_as_they_were():
                _connect(ray, address, cpus)
            yield ray
        finally:
            _own = False
            ray.shutdown()


def is_own_cluster() -> bool:
    """Whether the cluster was started by `ray_cluster`, which then stops it."""
    return _own


@contextmanager
def set_unless_given(settings: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment for a while, but for those that the user has set."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def package_path() -> dict[str, str]:
    """`PYTHONPATH` for other processes, where this package isn't installed but lies in a folder of its own."""
    folder = str(Path(__file__).parents[2])
    given = os.pathsep.join(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    if folder in (*site.getsitepackages(), site.getusersitepackages()):
        return {"PYTHONPATH": given} if given else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, given]))}


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    # Of each process that dies Ray says so, at length, on standard output, whatever it was told to log.
    ray._private.worker._worker_logs_enabled = False
    # Its failures come here as exceptions.
    consoles = [one for one in logging.getLogger("ray.data").handlers if one.get_name() == "console"]
    levels = [one.level for one in consoles]
    for console in consoles:
        console.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = True
        for console, level in zip(consoles, levels, strict=True):
            console.setLevel(level)


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    # Ray has a handler of its own for SIGTERM, which is for whoever trains or prepares to hear.
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)


def _connect(ray: Any, address: str, cpus: int) -> None:
    global _own
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address in _HERE:
        many = max(cpus, core_count())
        with _fewer_processes(ray):
            ray.init(address="local", include_dashboard=False, num_cpus=many, **quiet)
        _own = True
        _start_early()
        return
    try:
        _reach(address)
        ray.init(address=address, runtime_env={"env_vars": package_path()}, **quiet)
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"launch.address = {address!r}: Ray's token is missing or wrong ({error.message.rstrip('.')}); set "
            "RAY_AUTH_TOKEN to the cluster's, or RAY_AUTH_TOKEN_PATH to a file that holds it"
        ) from None
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"launch.address = {address!r}: no Ray cluster answers there ({why}); give the address that `ray start "
            "--head` shows, or leave out the key (and RAY_ADDRESS) for one on this machine"
        ) from None


@contextmanager
def _fewer_processes(ray: Any) -> Iterator[None]:
    # A dashboard's server, though without a dashboard, a monitor for the autoscaler, and one for logs that nobody sees:
    # each takes a processor seconds to start, and more as it goes on. Ray waits for the first, and has no setting for
    # any of them. They are its own affair, and may be elsewhere in another version.
    theirs = ray._private.node.Node
    idle = [name for name in ("start_api_server", "start_monitor", "start_log_monitor") if hasattr(theirs, name)]
    ray._private.node.Node = type("Node", (theirs,), {name: lambda self, **_: None for name in idle})
    try:
        yield
    finally:
        ray._private.node.Node = theirs


def _start_early() -> None:
    # Ray Train's controller would begin with this once it is there itself, and wait. It is Ray's own affair, and may be
    # elsewhere in another version.
    with suppress(Exception):
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

        coordinator.get_or_create_autoscaling_coordinator()


def _reach(address: str) -> None:
    # Where nothing listens, Ray would try for minutes.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
