"""The processes of a run of the PyTorch engine: how they meet, and which cards each of them sees."""

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.launch.group import TIMEOUT, Group, GroupError, Value

_BROADCASTS_KEPT = 256
_POLL_SECONDS = 0.002


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


def join(port: int, rank: int, size: int) -> TorchGroup:
    """Become one of the processes of a run on this machine.

    Arguments:
        port: where rank 0 listens, on this machine alone.
        rank: of this process.
        size: how many there are.

    Returns:
        The group; the default group of `torch.distributed` is made, too. Call `leave` at the end.
    """
    on_card = torch.cuda.is_available()
    if not on_card:  # as many threads as there are cores in each process would wait for each other
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = _store(port, rank, size)
    backends = "cpu:gloo,cuda:nccl" if on_card else "gloo"
    more = {"device_id": torch.device("cuda", 0)} if on_card else {}
    dist.init_process_group(backends, store=dist.PrefixStore("torch", store), rank=rank, world_size=size, **more)
    return TorchGroup(store, rank, size)


def leave(group: TorchGroup) -> None:
    """Part when all have come to the end."""
    group.barrier("end")
    dist.destroy_process_group()


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


def _store(port: int, rank: int, size: int) -> dist.Store:
    timeout = timedelta(seconds=TIMEOUT)
    if rank:
        return dist.TCPStore("127.0.0.1", port, size, False, timeout)
    # The launcher holds the port for this run, and lets others in that say so, too.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(size)
    return dist.TCPStore(
        "127.0.0.1", port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
