"""Whether all workers see the same run directory: found out before training, not at the first checkpoint."""

import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.group import Group
from meshwright.storage.store import Store, first_line

SHARED = ".shared"
"""Where in an object store the workers write to find out whether it is one for all."""

_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.1


def check_shared(directory: Path, group: Group) -> None:
    """Have every worker write into a folder and the first read it back, and the other way round.

    What it writes is removed again. With a group of one there is nothing to check.

    Arguments:
        directory: the run directory; made if missing.
        group: the workers, each calling this.

    Raises:
        UserError: a worker can't write there, or sees another folder than the first one; the same in every worker.
    """
    if group.size == 1:
        return
    folder = directory / group.broadcast(f".shared-{uuid.uuid4().hex[:12]}", "shared storage")
    problem = _write(folder, group.rank)
    group.barrier("shared storage written")
    seen: list[int] = []
    if group.is_primary and not problem:
        seen = _seen(folder, group.size)
        problem = _write(folder, group.size)  # one more than there are workers: what the others look for
    seen = group.broadcast(seen, "shared storage seen")
    sees_it = group.rank in seen and not problem and _appears(folder / str(group.size))
    reports: list[Any] = group.gather(
        [socket.gethostname(), str(directory.absolute()), problem, sees_it], "shared storage"
    )
    shutil.rmtree(folder, ignore_errors=True)
    group.barrier("shared storage checked")
    if any(problem for _, _, problem, _ in reports):
        where = "; ".join(f"{_who(rank, host)} at {path}: {what}" for rank, (host, path, what, _) in _bad(reports))
        raise UserError(f"run_dir = {str(directory)!r}: can't be written to by {where}")
    apart = [rank for rank, report in enumerate(reports) if rank and not (rank in seen and report[3])]
    if apart:
        with suppress(OSError):
            directory.rmdir()  # made just now, where nothing else is in it
        names = ", ".join(f"{_who(rank, reports[rank][0])} at {reports[rank][1]}" for rank in apart)
        raise UserError(
            f"run_dir = {str(directory)!r}: isn't one folder for all: that of {_who(0, reports[0][0])}, "
            f"{reports[0][1]}, isn't seen by {names}; give a folder on storage that all machines share, by the same "
            "path, or an object store (s3://bucket/path, gs://bucket/path)"
        )


def check_seen(mark: Path, group: Group) -> None:
    """See that every worker sees a file that the one who started them made in the run directory.

    Arguments:
        mark: the file.
        group: the workers, each calling this.

    Raises:
        UserError: a worker doesn't see it; the same in every worker.
    """
    reports: list[Any] = group.gather([socket.gethostname(), _appears(mark)], "shared with the driver")
    blind = [_who(rank, host) for rank, (host, sees_it) in enumerate(reports) if not sees_it]
    if blind:
        raise UserError(
            f"run_dir = {str(mark.parent)!r}: the driver's isn't seen by {', '.join(blind)}; give a folder on storage "
            "that the driver and all workers share, by the same path, or an object store (s3://bucket/path, "
            "gs://bucket/path)"
        )


def check_same_store(store: Store, group: Group) -> None:
    """The same of an object store, which each worker reaches by its own environment.

    Arguments:
        store: the run directory.
        group: the workers, each calling this.

    Raises:
        UserError: a worker can't write there, or reaches another store than the first one; the same in every worker.
    """
    if group.size == 1:
        return
    token = group.broadcast(uuid.uuid4().hex, "shared store").encode()
    problem = _put(store, group.rank, token)
    group.barrier("shared store written")
    others = range(1, group.size) if group.is_primary else [0]
    missed = [rank for rank in others if not _is_there(store, rank, token)]
    reports: list[Any] = group.gather([socket.gethostname(), problem, missed], "shared store")
    if not problem:
        store.remove([_object_of(group.rank)])
    if any(problem for _, problem, _ in reports):
        where = "; ".join(f"{_who(rank, host)}: {what}" for rank, (host, what, _) in enumerate(reports) if what)
        raise UserError(
            f"run_dir = {store.url!r}: can't be written to by {where}; give it credentials with which it may write"
        )
    apart = [rank for rank, (_, _, missed) in enumerate(reports) if rank and (missed or rank in reports[0][2])]
    if apart:
        names = ", ".join(_who(rank, reports[rank][0]) for rank in apart)
        raise UserError(
            f"run_dir = {store.url!r}: isn't one place for all: that of {_who(0, reports[0][0])} isn't seen by "
            f"{names}; see that the environment of each has the same endpoint and account"
        )


def _object_of(rank: int) -> str:
    return f"{SHARED}/{rank}"


def _put(store: Store, rank: int, token: bytes) -> str:
    try:
        store.write(_object_of(rank), token)
    except Exception as error:  # each library has its own
        return first_line(error)
    return ""


def _is_there(store: Store, rank: int, token: bytes) -> bool:
    with suppress(Exception):
        return store.read(_object_of(rank)) == token
    return False


def _write(folder: Path, number: int) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / str(number), "w") as file:
            file.write(socket.gethostname())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _seen(folder: Path, workers: int) -> list[int]:
    return [rank for rank in range(workers) if _appears(folder / str(rank))]


def _appears(path: Path) -> bool:
    # A network file system may show another machine's file a little late.
    end = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _bad(reports: list[Any]) -> list[tuple[int, Any]]:
    return [(rank, report) for rank, report in enumerate(reports) if report[2]]


def _who(rank: int, host: str) -> str:
    return f"worker {rank} ({host})"
