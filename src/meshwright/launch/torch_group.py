"""The processes of a run of the PyTorch engine: how they meet, and which cards each of them sees."""

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshwright.cores import core_count
from meshwright.errors import UserError
from meshwright.launch.addresses import LOOPBACK, address_for_others, interface_of, listen
from meshwright.launch.group import TIMEOUT, Group, GroupError, Value

_BROADCASTS_KEPT = 256
_POLL_SECONDS = 0.002
_LEFT = "meshwright/left"


class TorchGroup(Group):
    """The processes of `torch.distributed`, which meet over its store; `join` makes it.

    Arguments:
        store: shared by all. It is asked again and again rather than waited for: a call that waits would keep those of
            other threads waiting.
        rank: of this process.
        size: of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.rank = rank
        self.size = size
        self._store = store
        self._calls: defaultdict[str, count] = defaultdict(count)

    def barrier(self, name: str, timeout: float = TIMEOUT) -> None:
        """See `Group.barrier`."""
        key = f"meshwright/barrier/{name}/{next(self._calls['barrier ' + name])}"

        def meet() -> None:
            if self._store.add(key, 1) == self.size:
                self._store.set(f"{key}/all", "")
            self._await(f"{key}/all", timeout)

        self._told(f"barrier {name!r}", "not all workers came", timeout, meet)

    def broadcast(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> Value:
        """See `Group.broadcast`."""
        batch, number = divmod(next(self._calls["broadcast " + name]), _BROADCASTS_KEPT)
        folder = f"meshwright/broadcast/{name}/{batch}"

        def send_or_receive() -> str:
            if not self.is_primary:
                return self._await(f"{folder}/{number}", timeout)
            text = json.dumps(value)
            self._store.set(f"{folder}/{number}", text)
            return text

        text = self._told(f"broadcast {name!r}", "worker 0 sent nothing", timeout, send_or_receive)
        if number == _BROADCASTS_KEPT - 1:  # the store keeps every key until told: all have read these by now
            self.barrier(f"broadcast {name}", timeout)
            if self.is_primary:
                for one in range(_BROADCASTS_KEPT):
                    self._store.delete_key(f"{folder}/{one}")
        return json.loads(text)

    def gather(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> list[Value]:
        """See `Group.gather`."""
        folder = f"meshwright/gather/{name}/{next(self._calls['gather ' + name])}"

        def exchange() -> list[str]:
            self._store.set(f"{folder}/{self.rank}", json.dumps(value))
            return [self._await(f"{folder}/{rank}", timeout) for rank in range(self.size)]

        texts = self._told(f"gather {name!r}", "a worker sent nothing", timeout, exchange)
        return [json.loads(text) for text in texts]

    def close(self) -> None:
        """Go, once the others need the store no more: it goes with rank 0."""
        if not self.is_primary:
            with suppress(RuntimeError):  # the answer may come too late
                self._store.add(_LEFT, 1)
            return

        def wait() -> None:
            end = time.monotonic() + TIMEOUT
            while self._store.add(_LEFT, 0) < self.size - 1:
                if time.monotonic() > end:
                    raise TimeoutError
                time.sleep(_POLL_SECONDS)

        self._told("end", "not all workers left", TIMEOUT, wait)

    def _await(self, key: str, timeout: float) -> str:
        end = time.monotonic() + timeout
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(_POLL_SECONDS)
        return self._store.get(key).decode()

    def _told(self, what: str, late: str, timeout: float, do: Callable[[], Any]) -> Any:
        who = f"{what}: worker {self.rank} (of {self.size}, from 0)"
        try:
            return do()
        except TimeoutError:
            raise GroupError(
                f"{who} gave up: {late} within {timeout:g} s; the logs of the others may say why"
            ) from None
        except RuntimeError as error:  # of the store, whose errors are all such
            raise GroupError(f"{who}: a worker is gone: {str(error).partition(chr(10))[0]}") from error


def join(port: int, rank: int, size: int, host: str = LOOPBACK, *, on_ray: bool = False) -> TorchGroup:
    """Become one of the processes of a run.

    Arguments:
        port: where rank 0 listens.
        rank: of this process.
        size: how many there are.
        host: of rank 0; with `127.0.0.1` it listens on its machine alone.
        on_ray: whether Ray started it.

    Returns:
        The group; the default group of `torch.distributed` is made, too. Call `leave` at the end.

    Raises:
        UserError: some see a card and others none, or two the same one; the same in every process.
    """
    on_card = torch.cuda.is_available()
    # An interface is all that gloo can be told, and the user's word counts.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address_for_others(host))):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    store = _store(host, port, rank, size)
    group = TorchGroup(store, rank, size)
    card = str(torch.cuda.get_device_properties(0).uuid) if on_card else ""
    reports = group.gather([socket.gethostname(), card], "devices")
    check_cards(reports)
    if not on_card:
        torch.set_num_threads(threads_of([host for host, _ in reports].count(socket.gethostname()), on_ray=on_ray))
    backends = "cpu:gloo,cuda:nccl" if on_card else "gloo"
    more: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if on_card else {}
    dist.init_process_group(backends, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, **more)
    return group


def threads_of(processes: int, *, on_ray: bool) -> int:
    """How many threads PyTorch is to have on a CPU: as many as there are cores in each process would wait for each
    other.

    Arguments:
        processes: how many share this machine.
        on_ray: whether Ray started this one.
    """
    share = max(1, core_count() // processes)
    if on_ray:  # which sets OMP_NUM_THREADS to the one CPU that it sets aside
        return share
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else min(share, torch.get_num_threads())


def leave(group: TorchGroup) -> None:
    """Part when all have come to the end."""
    group.barrier("end")
    dist.destroy_process_group()
    group.close()


def found() -> tuple[int, str]:
    """How many processes have joined, and the platform of this one, `gpu` or `cpu`."""
    return dist.get_world_size(), "gpu" if torch.cuda.is_available() else "cpu"


def check_cards(reports: Sequence[Sequence[str]]) -> None:
    """See that each process has a card of its own, or none has one.

    Arguments:
        reports: of each process, by rank, the machine's name and what is unique to its card; empty: it has none.

    Raises:
        UserError: it isn't so.
    """
    names = [f"worker {rank} ({host})" for rank, (host, _) in enumerate(reports)]
    without = [name for name, (_, card) in zip(names, reports, strict=True) if not card]
    if without and len(without) < len(reports):
        raise UserError(
            f"launch: PyTorch sees no card in {', '.join(without)}, but does in the others; see to it that all are "
            "alike"
        )
    first: dict[str, str] = {}
    for name, (_, card) in zip(names, reports, strict=True):
        if card and first.setdefault(card, name) != name:
            raise UserError(
                f"launch: {first[card]} and {name} have the same card; set CUDA_VISIBLE_DEVICES in the environment of "
                "each to one of its own"
            )


def shares_of_cards(workers: int) -> list[dict[str, str]]:
    """What each worker's environment must say, so that it sees one card of its own; empty ones where there is none.

    Arguments:
        workers: how many.

    Raises:
        UserError: there are some cards, but too few.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = list(map(str, range(torch.cuda.device_count()))) if given is None else given.split(",")
    cards = [card for card in cards if card not in ("", "-1")]
    if not cards:
        return [{} for _ in range(workers)]
    if len(cards) < workers:
        raise UserError(
            f"launch.workers = {workers}: each needs a card of its own, and {len(cards)} can be seen; lower it, or set "
            'CUDA_VISIBLE_DEVICES="" in the environment to train on the CPU'
        )
    return [{"CUDA_VISIBLE_DEVICES": card} for card in cards[:workers]]


def _store(host: str, port: int, rank: int, size: int) -> dist.Store:
    timeout = timedelta(seconds=TIMEOUT)
    if rank:
        return dist.TCPStore(host, port, size, False, timeout)
    # What started this process holds the port for it, and lets others in that say so, too.
    descriptor = listen(host, port, shared=True).detach()
    return dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
