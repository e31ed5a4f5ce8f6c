"""Refuse a run that can't fit its devices' memory, before any of it is allocated."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax

from meshwright.engines.jax.estimate import Estimate, estimate, human_bytes
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.rules import ACTIVATIONS
from meshwright.errors import UserError


def device_memory(processes: int = 1) -> int | None:
    """Bytes that JAX may use of one device of this process; None where that isn't known.

    On an accelerator, what its allocator was given; on a CPU, an equal share of this machine's memory.

    Arguments:
        processes: how many of this machine train together; they share a CPU's memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        try:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not on every system
            return None
        return there // (jax.local_device_count() * processes)
    return (device.memory_stats() or {}).get("bytes_limit")


def compiled_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Bytes that a compiled function takes on one device, by XLA's count; None where the backend has none.

    Arguments and results, those counted once that share memory, and all that is there in between.
    """
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return arrays + sizes.temp_size_in_bytes


def fitting_train_step(program: Program, *, training: bool = True) -> Callable[..., Any]:
    """The train step of a program, compiled as soon as it is certain that the state fits.

    Compiling ahead costs no time: what is compiled is what trains. It is left out where the memory of the devices isn't
    known, and where the program isn't to train.

    Arguments:
        program: of a run.
        training: whether it is to train.

    Raises:
        UserError: the run needs more memory than a device has.
    """
    memory = device_memory(program.run.launch.processes_here)
    if memory is None:
        return program.train_step
    check_state(program, memory)
    if not training:
        return program.train_step
    try:
        compiled = program.compile_train_step()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # a TPU's compiler gives up where memory doesn't suffice
            raise
        raise _too_large(program, "more", memory) from None
    needed = compiled_bytes(compiled)
    if needed is not None and needed > memory:
        raise _too_large(program, human_bytes(needed), memory)
    return compiled


def check_state(program: Program, memory: int) -> None:
    """Refuse a run whose state alone is larger than a device's memory.

    Arguments:
        program: of a run.
        memory: bytes of a device.

    Raises:
        UserError: it is larger.
    """
    needed = _estimate(program)
    if needed.state <= memory:
        return
    fsdp, width = program.mesh.sizes["fsdp"], program.spec.width
    least = math.ceil(fsdp * needed.state / memory)
    fits = next((size for size in range(least, width + 1) if width % size == 0), least)
    raise UserError(
        f"mesh.fsdp = {fsdp}: parameters and optimizer state alone take {human_bytes(needed.state)} on each device, "
        f"which has {human_bytes(memory)}; raise it to {fits} or more, with as many devices, or make the model "
        f"smaller. By estimate, training takes {_by_kind(needed)}"
    )


def _too_large(program: Program, needed: str, memory: int) -> UserError:
    run, sizes = program.run, program.mesh.sizes
    advice = [f"raise mesh.fsdp = {sizes['fsdp']}"]
    if run.train.remat != "full":
        advice.insert(0, f'set train.remat = "full" (it is "{run.train.remat}")')
    if run.micro_batch_size > math.prod(sizes[axis] for axis in ACTIVATIONS["batch"]):
        advice.insert(0, "lower it")
    return UserError(
        f"train.micro_batch_size = {run.micro_batch_size}: the compiled train step takes {needed} on each device, "
        f"which has {human_bytes(memory)}; {' or '.join(advice)}. "
        f"By estimate, training takes {_by_kind(_estimate(program))}"
    )


def _estimate(program: Program) -> Estimate:
    return estimate(program.run, program.spec, program.mesh, program.state, program.dtype)


def _by_kind(needed: Estimate) -> str:
    kinds = (
        ("parameters", needed.parameters),
        ("gradients", needed.gradients),
        ("optimizer state", needed.optimizer),
        ("activations", needed.activations),
        ("the rest", needed.kernels + needed.head + needed.work),
    )
    return f"{human_bytes(needed.total)}: " + ", ".join(f"{name} {human_bytes(size)}" for name, size in kinds)
