"""Who trains in a run directory on an object store. A lock, as a folder has it, doesn't hold there.

The one that trains keeps an object with its name, and renews it. Another start waits to see whether it is renewed, and
takes the lease over if it isn't. Before each commit the holder reads the lease again, so one that was taken for dead
and comes back commits nothing any more.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from meshwright.errors import UserError
from meshwright.storage.store import Store

JOB = "MESHWRIGHT_JOB"
"""Environment variable that names a job whose processes follow each other; a restart within one needn't wait."""

_NAME = ".lease.json"
_RENEW_SECONDS = 10.0
_SECONDS = 30.0
_LONG_GONE_SECONDS = 600.0  # more than clocks differ by
_SETTLE_SECONDS = 0.5


class Lease:
    """The right to write into a run directory.

    Arguments:
        store: the run directory.
        note: told when this has to wait.

    Raises:
        UserError: another process trains there.
    """

    def __init__(self, store: Store, note: Callable[[str], None]):
        self._store = store
        self._mine: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "job": os.environ.get(JOB, ""),
            "host": socket.gethostname(),
            "place": _place(),
            "process": os.getpid(),
            "renewed": 0,
        }
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._wait_for(note)
        self._write()
        time.sleep(_SETTLE_SECONDS)  # of two that start at the same moment the last to write has it
        self.check()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """See that this process has the lease yet.

        Raises:
            UserError: another one has taken it, be it that it has ended since, or it was given up.
        """
        holder = _read(self._store)
        if holder is None:
            raise UserError(
                f"run_dir = {self._store.url!r}: another process has trained here since; start again, which goes on "
                "from the newest checkpoint"
            )
        if holder["id"] != self._mine["id"]:
            raise _taken(self._store, holder)

    def close(self) -> None:
        """Give the lease up."""
        self._ended.set()
        with self._writing, suppress(Exception):
            self.check()
            self._store.remove([_NAME])

    def _wait_for(self, note: Callable[[str], None]) -> None:
        first = holder = _read(self._store)
        if holder is None or self._is_over(holder):
            return
        age = self._store.age(_NAME)
        if age is None or age > _LONG_GONE_SECONDS:
            return
        note(f"waiting up to {_SECONDS:g} s to see whether {_who(holder)} still trains in {self._store.url}")
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            time.sleep(1.0)
            holder = _read(self._store)
            if holder is None:
                return
            if holder != first:
                raise _taken(self._store, holder)

    def _is_over(self, holder: dict[str, Any]) -> bool:
        if self._mine["job"] and holder["job"] == self._mine["job"]:
            return True
        return holder["place"] == self._mine["place"] and not _is_alive(holder["process"])

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            with self._writing, suppress(Exception):  # it is checked before each commit
                if self._ended.is_set():
                    return
                self.check()
                self._mine["renewed"] += 1
                self._write()

    def _write(self) -> None:
        self._store.write(_NAME, json.dumps(self._mine).encode())


def _read(store: Store) -> dict[str, Any] | None:
    content = store.read(_NAME)
    try:
        holder = json.loads(content or b"null")
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and {"id", "job", "host", "place", "process"} <= holder.keys() else None


def _taken(store: Store, holder: dict[str, Any]) -> UserError:
    return UserError(
        f"run_dir = {store.url!r}: {_who(holder)} is training in this run directory; wait for it, stop it, or give "
        "this run another one"
    )


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder['process']} of {holder['host']}"


def _place() -> str:
    """Where process ids mean the same processes: a container has ids of its own, a machine new ones at each start."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
