"""How the workers of Ray Train become the processes of one run, of either engine, on CPUs, GPUs and TPUs alike.

Ray's own backend for JAX starts them on accelerators alone, and on one host gives all GPU workers the same cards.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.v2.jax.config import JaxConfig
from ray.util.tpu import get_tpu_coordinator_env_vars

from meshwright.launch import ray_worker

# A worker that stops needs to finish its step and to save.
_STOP_SECONDS = 120.0
_ASK_SECONDS = 2.0


@dataclass
class JaxProcesses(JaxConfig):
    """Ray Train's backend of a run of the JAX engine."""

    desk: Any = None
    """The actor `Desk`, which is told of whether the workers have their places."""

    @property
    def backend_cls(self) -> type[Backend]:
        """See `JaxConfig`."""
        return ProcessesBackend


class ProcessesBackend(Backend):
    """Tells each worker its place; it joins the others there before it trains. Leaves `CUDA_VISIBLE_DEVICES` alone."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """See `Backend`."""
        size = len(worker_group)
        keys = worker_group.execute(_place_key)
        # Ray numbers the workers of a TPU slice as they come, but the slice has an order of its own.
        order = sorted(range(size), key=lambda index: (*keys[index], index))
        rank_of = {index: rank for rank, index in enumerate(order)}
        address = worker_group.execute_single(order[0], _address)
        variables = _slice_variables(worker_group, address)
        ray.get(
            [
                worker_group.execute_single_async(
                    index, ray_worker.take_place, address, rank_of[index], size, variables[index]
                )
                for index in range(size)
            ]
        )
        ray.get(backend_config.desk.workers_are.remote(placed=True))

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """See `Backend`. Workers that are all at work are to be moved, to more nodes or fewer: they save first."""
        with suppress(ray.exceptions.RayError):
            if all(ray.get(worker_group.execute_async(ray_worker.is_training), timeout=_ASK_SECONDS)):
                ray.get(
                    worker_group.execute_async(ray_worker.move, _STOP_SECONDS), timeout=_STOP_SECONDS + _ASK_SECONDS
                )
        with suppress(ray.exceptions.RayError):  # its driver may be gone
            ray.get(backend_config.desk.workers_are.remote(placed=False))


def _place_key() -> tuple[str, int]:
    return os.environ.get("TPU_NAME", ""), int(os.environ.get("TPU_WORKER_ID") or 0)


def _address() -> str:
    # It stays reserved for as long as this process lives: gRPC shares it, and `addresses.listen`.
    ip = ray.util.get_node_ip_address()
    holder = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("", 0))
    ray_worker.reserved.append(holder)
    return f"{f'[{ip}]' if ':' in ip else ip}:{holder.getsockname()[1]}"


def _slice_variables(worker_group: Any, address: str) -> list[dict[str, str]]:
    size = len(worker_group)
    slices = worker_group.get_worker_group_context().num_slices
    if slices < 2:
        return [{} for _ in range(size)]
    host = address.rpartition(":")[0].strip("[]")
    return [
        get_tpu_coordinator_env_vars(coordinator_address=host, num_slices=slices, slice_id=index * slices // size)
        for index in range(size)
    ]
