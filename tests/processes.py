"""Run a function in several processes that are one group, of JAX or of PyTorch (gloo): `run_processes`."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_processes(
    function: Callable[..., Any],
    workers: int = 2,
    devices_per_worker: int = 1,
    timeout: float = 180,
    arguments: tuple = (),
    engine: str = "jax",
) -> list:
    """Call a function in each process of a group, on virtual CPU devices.

    Arguments:
        function: of a module's top level, in a file; called with the process's `Group`, then `arguments`. What it
            returns, and `arguments`, must be what JSON can hold.
        workers: how many processes.
        devices_per_worker: how many devices each has; with PyTorch, 1.
        timeout: seconds until all are killed.
        engine: whose group it is, `jax` or `torch`.

    Returns:
        What the function returned, by rank.

    Raises:
        AssertionError: a process failed, or time was up; with what each wrote.
    """
    from meshwright.launch.processes import reserved_port

    with tempfile.TemporaryDirectory(prefix="meshwright-processes-") as name, reserved_port() as port:
        folder = Path(name)
        call = [engine, inspect.getfile(function), function.__name__, json.dumps(arguments)]
        place = [*map(str, (workers, devices_per_worker, port, os.getpid())), name]
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(workers):
                with open(folder / f"{rank}.log", "wb") as log:
                    command = [sys.executable, __file__, *call, str(rank), *place]
                    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        logs = [f"--- worker {rank}: exit code {code}\n{_read(folder, rank)}" for rank, code in enumerate(codes)]
        assert not any(codes), "\n".join([f"{function.__name__} failed (or took {timeout} s)", *logs])
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


def _wait(processes: list[subprocess.Popen], timeout: float) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.02)


def _read(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace")


def _main(
    engine: str,
    file: str,
    function: str,
    arguments: str,
    rank: str,
    size: str,
    devices: str,
    port: str,
    parent: str,
    folder: str,
) -> None:
    from meshwright.launch.processes import end_with

    end_with(int(parent))
    group, leave = (_of_jax if engine == "jax" else _of_torch)(int(port), int(rank), int(size), int(devices))
    spec = importlib.util.spec_from_file_location("module_of_the_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(group, *json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    leave()


def _of_jax(port: int, rank: int, size: int, devices: int) -> tuple[Any, Callable[[], None]]:
    import jax

    from meshwright.launch.devices import join

    jax.config.update("jax_num_cpu_devices", devices)
    return join(f"127.0.0.1:{port}", rank, size), jax.distributed.shutdown


def _of_torch(port: int, rank: int, size: int, devices: int) -> tuple[Any, Callable[[], None]]:
    from meshwright.launch.torch_group import join, leave

    assert devices == 1
    group = join(port, rank, size)
    return group, lambda: leave(group)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # see `meshwright.launch.devices.join`
