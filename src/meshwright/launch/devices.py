"""Which devices a process trains on: what JAX must be told before it starts, and each worker's share of the cards."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from meshwright.config import Run
from meshwright.cores import core_count
from meshwright.errors import UserError
from meshwright.launch.addresses import LOOPBACK, address_for_others, split
from meshwright.launch.group import JaxGroup

_NVIDIA = Path("/proc/driver/nvidia/version")
_HEARTBEAT_SECONDS = 20
_FEWEST_THREADS = 64
_COUNT = """
import ctypes
cuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(found)) else found.value)
"""


def on_cpu() -> bool:
    """Whether JAX has nothing but the CPU to use. Asking JAX itself would start its threads."""
    no_plugin = not entry_points(group="jax_plugins") and find_spec("libtpu") is None
    return os.environ.get("JAX_PLATFORMS") == "cpu" or no_plugin


def idle_card() -> str:
    """What to say where JAX has been installed without what an NVIDIA card of this machine needs; empty: nothing."""
    if not _NVIDIA.exists() or "JAX_PLATFORMS" in os.environ or not on_cpu():
        return ""
    return "an NVIDIA card is here, but JAX has the CPU alone; pip install 'meshwright[cuda]' to use it"


def prepare_devices(run: Run) -> None:
    """Have JAX use `launch.devices_per_worker` devices in this process; call it before JAX starts its backend.

    On a CPU they are virtual ones; of NVIDIA cards the first ones. With 0, JAX takes what there is.

    Arguments:
        run: a checked run file.

    Raises:
        UserError: there are fewer cards, the environment asks for another number, or JAX has been started with one.
    """
    import jax

    wanted = run.launch.devices_per_worker
    if wanted and on_cpu():
        _use_virtual_devices(wanted)
    elif wanted:
        there = len(_enough_cards(wanted, f"launch.devices_per_worker = {wanted}"))
        if wanted < there:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(wanted))))


def shares_of_cards(run: Run) -> list[dict[str, str]]:
    """What each worker's environment must say, so that it sees its own cards and no other's.

    Arguments:
        run: a run with `launch.kind = "processes"`.

    Returns:
        A dictionary for each worker; empty ones on a CPU.

    Raises:
        UserError: there are too few NVIDIA cards, or they can't be shared equally.
    """
    workers, each = run.launch.processes, run.launch.devices_per_worker
    if on_cpu():
        return [{} for _ in range(workers)]
    key = f"launch.workers = {workers}" + (f" with launch.devices_per_worker = {each}" if each else "")
    cards = _enough_cards(workers * max(each, 1), key)
    if each == 0 and len(cards) % workers:
        raise UserError(
            f"{key}: {len(cards)} cards can't be shared equally; set launch.devices_per_worker to at most "
            f"{len(cards) // workers}, or change the number of workers"
        )
    each = each or len(cards) // workers
    return [{"CUDA_VISIBLE_DEVICES": ",".join(cards[i * each : (i + 1) * each])} for i in range(workers)]


def join(address: str, rank: int, size: int) -> JaxGroup:
    """Become one of the processes of a run; call it before JAX starts its backend.

    Arguments:
        address: `host:port` where rank 0 listens; with `127.0.0.1` on its machine alone.
        rank: of this process.
        size: how many there are.

    Returns:
        The group. Call `jax.distributed.shutdown()` at the end, which waits for the others; a process that fails must
        leave by `os._exit`, since an ordinary exit waits for them, too.
    """
    import jax
    from jax._src import distributed

    host = address.rpartition(":")[0]
    # gRPC would ask the user's proxy for a machine beside this one, and JAX warns of that.
    os.environ.setdefault("no_grpc_proxy", host)
    jax.config.update("jax_check_proxy_envs", False)
    # It would catch SIGTERM, which the trainer catches, and hold up the exit after one by minutes.
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu():
        # A thread that sends or receives does nothing else. With as many as there are cores, all of a process could
        # wait for what another one has no thread left to send.
        os.environ.setdefault("PJRT_NPROC", str(max(_FEWEST_THREADS, core_count())))
        # Programs that don't wait for each other, as those of an evaluation, would else run at once, and what they send
        # could be taken for another's: each process might come to it in another order.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        _listen_for_others(address)
    jax.distributed.initialize(
        address,
        size,
        rank,
        coordinator_bind_address=address if host == LOOPBACK else None,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    return JaxGroup(distributed.global_state.client, rank, size)


def _listen_for_others(address: str) -> None:
    from jax._src.lib import _jax

    if own := address_for_others(split(address)[0]):
        make = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = partial(make, hostname=own)


def _use_virtual_devices(wanted: int) -> None:
    import jax

    # JAX would pass over the one and never say so.
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    _refuse_another("--xla_force_host_platform_device_count in XLA_FLAGS", flags[-1] if flags else "", wanted)
    _refuse_another("JAX_NUM_CPU_DEVICES", os.environ.get("JAX_NUM_CPU_DEVICES", ""), wanted)
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if (there := jax.local_device_count()) != wanted:
            raise UserError(
                f"launch.devices_per_worker = {wanted}: JAX has been started in this process already, with {there}, "
                "and can't be changed; train in a new process, before anything that uses JAX"
            ) from None


def _refuse_another(name: str, given: str, wanted: int) -> None:
    if given not in ("", "-1", str(wanted)):
        raise UserError(
            f"launch.devices_per_worker = {wanted}: the environment asks for {given} ({name}); leave one of them out, "
            "or make them the same"
        )


def _enough_cards(needed: int, key: str) -> list[str]:
    cards = _visible_cards()
    if needed > len(cards):
        there = f"only {len(cards)} can be seen" if cards else "none can be seen"
        raise UserError(
            f"{key}: needs {needed} NVIDIA cards, and {there}; lower it, or set JAX_PLATFORMS=cpu in the environment "
            "to train on the CPU"
        )
    return cards


def _visible_cards() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(number) for number in range(_card_count())]
    return list(takewhile(lambda card: card not in ("", "-1"), (card.strip() for card in given.split(","))))


def _card_count() -> int:
    # JAX would start its backend for this, and a launcher that did would keep the cards' memory from its workers. CUDA
    # reads CUDA_VISIBLE_DEVICES once a process, and this one may have yet to set it.
    done = subprocess.run([sys.executable, "-S", "-c", _COUNT], capture_output=True, text=True)
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0
