"""The workers of a run that were started by hand find each other, before their framework starts.

JAX ends a process at once that waits in vain for another, PyTorch lets it wait, and neither says anything that a user
could act on. So the first worker calls the roll: it waits for the others at the address that the framework will use,
sees that all have the same run file, and tells every one whether to go on, or what must be mended. The connections stay
open to the end, which tells each side at once when the other is gone.
"""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.addresses import listen, split

_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 5.0
_SLACK_SECONDS = 10.0
_LONGEST = 2**20  # bytes of a message
_BYE, _FAILED = b"bye\n", b"err\n"
_SETTLE_SECONDS = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Peers:
    """The other workers: to the first one all, to each of those the first one.

    Arguments:
        connections: by rank.
        hosts: their names, by rank.
    """

    def __init__(self, connections: dict[int, socket.socket], hosts: dict[int, str]):
        self._connections = connections
        self._hosts = hosts
        self._closed = threading.Event()
        self.gone: str = ""
        """The one that was lost, in words; empty: none."""
        self.lost = threading.Event()
        """Set when one was lost."""

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Look after them in a thread of its own.

        Arguments:
            on_loss: called there with the one that is gone, in words, unless it had taken its leave.
        """
        threading.Thread(target=self._watch, args=(on_loss,), name="peers", daemon=True).start()

    def close(self, *, failed: bool = False) -> None:
        """Take leave, so that the end of this process isn't taken for a loss.

        Arguments:
            failed: whether the others must end, too, though they may be about to find for themselves why.
        """
        self._closed.set()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(_FAILED if failed else _BYE)
                connection.close()

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        waiting = dict(self._connections)
        while waiting and not self._closed.is_set():
            readable = _readable(list(waiting.values()), 1.0)
            for rank in [rank for rank, connection in waiting.items() if connection in readable]:
                connection = waiting.pop(rank)
                try:
                    said = connection.recv(len(_BYE))
                except OSError:
                    said = b""
                if said == _FAILED:
                    self._closed.wait(_SETTLE_SECONDS)
                if said != _BYE and not self._closed.is_set():
                    self.gone = _who(rank, self._hosts[rank])
                    self.lost.set()
                    on_loss(self.gone)
                    return


def roll_call(address: str, rank: int, size: int, facts: dict[str, Any], timeout: float) -> Peers:
    """Wait until all workers of a run are there.

    Arguments:
        address: `host:port` of the first one; the port is free again afterwards.
        rank: of this one.
        size: how many there are.
        facts: what must be the same in all, such as the keys of the run file; what JSON can hold.
        timeout: seconds after which to give up.

    Raises:
        UserError: not all came in time, or they aren't the same; the same in all that did come.
    """
    mine = {"rank": rank, "size": size, "host": socket.gethostname(), "facts": facts}
    return _call(address, mine, timeout) if rank == 0 else _answer(address, mine, timeout)


def _call(address: str, mine: dict[str, Any], timeout: float) -> Peers:
    here: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    refused: list[socket.socket] = []
    problem, end = "", time.monotonic() + timeout
    with _listener(address) as listener:
        while not problem and not _all_are_here(here, mine["size"]):
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                problem = _missing(address, mine["size"], here, timeout)
                break
            hello = _heard(connection, _HELLO_SECONDS, mine.keys())
            if hello is None:
                connection.close()
            elif problem := _misplaced(hello, mine, here):
                refused.append(connection)
            else:
                here[hello["rank"]] = (connection, hello)
    problem = problem or next(filter(None, (_difference(hello, mine) for _, hello in here.values())), "")
    for connection in [*refused, *(connection for connection, _ in here.values())]:
        with suppress(OSError):
            _say(connection, {"problem": problem, "host": mine["host"]})
            _keep_alive(connection)
    if problem:
        raise UserError(problem)
    return Peers(
        {rank: one for rank, (one, _) in here.items()}, {rank: told["host"] for rank, (_, told) in here.items()}
    )


def _answer(address: str, mine: dict[str, Any], timeout: float) -> Peers:
    place = split(address)
    end, why = time.monotonic() + timeout, "no answer"
    while time.monotonic() < end:
        try:
            connection = socket.create_connection(place, timeout=_HELLO_SECONDS)
            _say(connection, mine)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        # It may have begun to wait later than this one did.
        verdict = _heard(connection, timeout + _SLACK_SECONDS, {"problem", "host"})
        if verdict is None:
            why = "it hung up, or isn't a worker of meshwright"
            connection.close()
            time.sleep(_RETRY_SECONDS)
            continue
        if verdict["problem"]:
            raise UserError(verdict["problem"])
        _keep_alive(connection)
        return Peers({0: connection}, {0: verdict["host"]})
    raise UserError(
        f"launch.coordinator = {address!r}: worker {mine['rank']} gave up after {timeout:g} s "
        f"(launch.start_timeout): {why}; start worker 0 (launch.index = 0) there, and see that the port is open"
    )


def _listener(address: str) -> socket.socket:
    host, port = split(address)
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise UserError(
            f"launch.coordinator = {address!r}: worker 0 can't wait for the others at port {port}: {why}; "
            "choose another port"
        ) from None


def _missing(address: str, size: int, here: dict[int, Any], timeout: float) -> str:
    missing = [str(rank) for rank in range(1, size) if rank not in here]
    what = "worker" if len(missing) == 1 else "workers"
    return (
        f"launch.workers = {size}: {what} {', '.join(missing)} didn't come to {address} within {timeout:g} s "
        "(launch.start_timeout); start every one, each with its launch.index"
    )


def _misplaced(hello: dict[str, Any], mine: dict[str, Any], here: dict[int, Any]) -> str:
    who = _who(hello["rank"], hello["host"])
    if hello["size"] != mine["size"]:
        return (
            f"launch.workers = {hello['size']} in {who}, {mine['size']} in {_who(0, mine['host'])}: must be the same "
            "in all; start each with the same run file"
        )
    if hello["rank"] in here and not _has_hung_up(here[hello["rank"]][0]):
        other = here[hello["rank"]][1]["host"]
        return (
            f"launch.index = {hello['rank']}: is that of two workers, on {other} and {hello['host']}; give one another"
        )
    return ""


def _difference(hello: dict[str, Any], mine: dict[str, Any]) -> str:
    theirs, ours = hello["facts"], mine["facts"]
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if theirs.get(key) != ours.get(key):
            return (
                f"{key} = {theirs.get(key)!r} in {_who(hello['rank'], hello['host'])}, {ours.get(key)!r} in "
                f"{_who(0, mine['host'])}: must be the same in all; start each with the same run file"
            )
    return ""


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _heard(connection: socket.socket, timeout: float, keys: Set[str]) -> dict[str, Any] | None:
    connection.settimeout(timeout)
    said = b""
    try:
        while not said.endswith(b"\n") and len(said) < _LONGEST:
            seen = connection.recv(65536, socket.MSG_PEEK)
            if not seen:
                return None
            line, newline, _ = seen.partition(b"\n")  # what is behind it is for later: it may be the other's leave
            said += connection.recv(len(line) + len(newline))
        message = json.loads(said)
    except (OSError, ValueError):
        return None
    finally:
        connection.settimeout(None)
    return message if isinstance(message, dict) and keys <= message.keys() else None


def _all_are_here(here: dict[int, Any], size: int) -> bool:
    for rank in [rank for rank, (connection, _) in here.items() if _has_hung_up(connection)]:
        del here[rank]  # it was stopped, and may be started again
    return len(here) == size - 1


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return bool(_readable([connection], 0)) and not connection.recv(1)
    except OSError:
        return True


def _readable(connections: list[socket.socket], seconds: float) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        try:
            for connection in connections:
                selector.register(connection, selectors.EVENT_READ)
        except ValueError:  # closed meanwhile
            return []
        return [key.fileobj for key, _ in selector.select(seconds) if isinstance(key.fileobj, socket.socket)]


def _keep_alive(connection: socket.socket) -> None:
    # A machine that loses its power says nothing.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _who(rank: int, host: str) -> str:
    return f"worker {rank} ({host})"
