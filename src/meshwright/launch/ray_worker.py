"""A worker of a run on Ray: takes its place among the others, trains, and says why where it can't."""

import os
import signal
import socket
import sys
import threading
import time
import tomllib
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.checkpoints import Checkpoint
from meshwright.config import Run, make_run
from meshwright.errors import UserError
from meshwright.launch import joining
from meshwright.launch.group import Group
from meshwright.launch.ray_desk import BEAT_SECONDS, DeskConsole, Failure, all_others_live, keep_in_touch
from meshwright.rundir import RunDirectory
from meshwright.signals import Stop

MOVE = int(signal.SIGUSR1)
"""In place of a signal that asks to stop: save, and go on elsewhere."""

# A process whose driver was killed still holds the run directory for a moment, and NFS holds it for 90 s for a machine
# that is gone.
_LOCK_SECONDS = 150.0
_FIRST_STEP_SECONDS = 1800.0


@dataclass(frozen=True)
class Task:
    """What a worker needs to know."""

    run: str
    """As TOML."""
    folder: str
    """The driver's, from which the run file's paths start."""
    desk: Any
    """The actor `Desk`."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    devices: int
    """Of each worker; 0: what there is."""
    most: int
    """The most workers that there may be."""
    mark: str
    """Name of a file that the driver made in the run directory, which all must see; empty: it is on an object store."""
    parts: dict[str, Any] = field(default_factory=dict)
    """A researcher's own model, optimizer and metrics."""


@dataclass
class _Place:
    address: str
    rank: int
    size: int


reserved: list[socket.socket] = []
"""Ports that stay this process's."""

_place: _Place | None = None
_stop = Stop()
_training = threading.Event()
_ended = threading.Event()


def take_place(address: str, rank: int, size: int, variables: dict[str, str]) -> None:
    """Be told where to join, before training begins.

    Arguments:
        address: of rank 0.
        rank: of this process.
        size: how many there are.
        variables: to set in the environment.
    """
    global _place
    _place = _Place(address, rank, size)
    os.environ.update(variables)


def is_training() -> bool:
    """Whether this process trains just now."""
    return _training.is_set() and not _ended.is_set()


def move(seconds: float) -> None:
    """Have training saved and stopped, and wait so long for that."""
    _stop.signal = _stop.signal or MOVE
    _ended.wait(seconds)


def train_worker(task: Task) -> dict[str, Any] | None:
    """Train, as one of the workers; the training function of Ray Train.

    Returns:
        `step`, `evaluation` and `stopped_by` of the outcome; None: the run had ended.

    Raises:
        Exception: what went wrong. What starting again can't mend is told to the desk first.
    """
    import ray

    assert _place is not None
    if not ray.get(task.desk.is_open.remote()):
        return None
    console = DeskConsole(task.desk, lambda: _stop.signal == MOVE)
    try:
        run = make_run(tomllib.loads(task.run))
        watch = partial(_look, console, run.launch.hang_timeout if _place.rank == 0 else None)
        keep_in_touch(console, _place.rank, _stop, watch)  # first, as one that doesn't beat is taken for dead
        go_to(task.folder)
        _write_to_log(run, _place.rank)
        return _train(task, run, _place, console)
    except BaseException as error:
        traceback.print_exc()
        console.close()  # after a failure nothing more is shown
        if isinstance(error, UserError) and _place.rank > 0:
            time.sleep(2 * BEAT_SECONDS)  # in which the first worker says what it has to say
        # What goes wrong since another worker is gone looks like any other error.
        if isinstance(error, UserError) or all_others_live(task.desk, _place.rank, _place.size):
            ray.get(task.desk.fail.remote(_failure(error, _place.rank)))
        raise
    finally:
        console.close()
        _ended.set()


def _train(task: Task, run: Run, place: _Place, console: DeskConsole) -> dict[str, Any]:
    from meshwright import trainer
    from meshwright.api import make_engine
    from meshwright.launch.shared_storage import check_seen, check_shared

    if task.platform == "cpu":
        joining.prepare(run)
    group = joining.join(run, place.address, place.rank, place.size)
    check_devices(task, joining.found(run), group)
    if task.mark:
        check_seen(run.directory / task.mark, group)
        check_shared(run.directory, group)
    if group.is_primary:
        _wait_for_lock(RunDirectory(run.directory), console)
    run = with_the_same_micro_batches(run, place.size, task.most)
    _training.set()
    outcome = trainer.train(
        run,
        partial(make_engine, **task.parts),
        console,
        group=group,
        stop=_stop,
        on_committed=partial(_report, group) if task.mark else None,
    )
    if outcome.stopped_by == MOVE and group.is_primary:
        console.note("the workers are moved: the run goes on from there")
    joining.leave(run, group)
    return {"step": outcome.step, "evaluation": outcome.evaluation, "stopped_by": outcome.stopped_by}


def check_devices(task: Task, found: joining.Found, group: Group) -> None:
    """See that each worker has the devices that it is to have.

    Arguments:
        task: says which.
        found: those that this one has.
        group: the workers, each calling this.

    Raises:
        UserError: a worker has others; the same in every worker.
    """
    there = {"processes": found.processes, "devices of a process": found.devices}
    wanted = {"processes": group.size, "devices of a process": task.devices or found.devices}
    differing = [f"{there[key]} {key} where {wanted[key]} were asked for" for key in there if there[key] != wanted[key]]
    if task.platform != found.platform and "JAX_PLATFORMS" not in os.environ:
        differing.append(f"the platform {found.platform} where {task.platform} was asked for")
    mine = f"{found.framework} has {', '.join(differing)} (on the node {node()})" if differing else ""
    problems = [one for one in group.gather(mine, "devices") if one]
    if problems:
        raise UserError(f"launch: {problems[0]}; see to it that all nodes are alike")


def with_the_same_micro_batches(run: Run, size: int, most: int) -> Run:
    """Fewer workers take more turns over a batch, so that each holds as many sequences at a time as before.

    Arguments:
        run: its micro-batches are those of the most workers.
        size: how many there are.
        most: how many there may be.

    Returns:
        The run, with smaller micro-batches where they divide the batch.
    """
    if size == most:
        return run
    micro = run.micro_batch_size * size // most
    fits = micro > 0 and run.micro_batch_size * size % most == 0 and run.train.batch_size % micro == 0
    if not fits:
        return run
    return run.model_copy(update={"train": run.train.model_copy(update={"micro_batch_size": micro})})


def _report(group: Group, checkpoint: Checkpoint) -> None:
    from ray import train
    from ray.train.v2.api.report_config import CheckpointUploadMode

    # A controller that has workers stop, to start others, doesn't take their reports any more.
    if group.broadcast(_stop.signal != 0, "report"):
        return
    facts = {key: checkpoint.manifest.get(key) for key in ("step", "tokens", "val_loss")}
    metrics = {key: float(value) for key, value in facts.items() if value is not None}
    ours = train.Checkpoint(str(checkpoint.folder.absolute())) if group.is_primary else None
    train.report(metrics, ours, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _preemption() -> Any:
    from ray.train.v2._internal.execution.context import get_train_context  # the public way to it is a barrier

    return get_train_context().preemption_context.preemption_info


def _look(console: DeskConsole, hang_timeout: float | None) -> None:
    drained = None
    with suppress(Exception):  # it isn't a public name of Ray's, and the beats must go on
        drained = _preemption()
    if drained is not None:
        _stop.signal = _stop.signal or MOVE
    # To start, and to compile the first step, may take longer than any other step.
    if hang_timeout is not None and not console.stepped:
        hang_timeout = max(hang_timeout, _FIRST_STEP_SECONDS)
    if hang_timeout is not None and not _ended.is_set() and time.monotonic() - console.moved > hang_timeout:
        console.note(f"no step was finished in launch.hang_timeout = {hang_timeout:g} s: the workers start again")
        console.close()
        os._exit(1)


def _failure(error: BaseException, rank: int) -> Failure:
    if isinstance(error, UserError):
        return Failure(rank, node(), str(error), mistake=True)
    return Failure(rank, node(), traceback.format_exc(), mistake=False)


def go_to(folder: str) -> None:
    """Make a folder the current one.

    Raises:
        UserError: this node doesn't have it.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: can't be entered on the node {node()} ({error.strerror}); start from a folder that all nodes "
            "of the cluster see"
        ) from None


def _write_to_log(run: Run, rank: int) -> None:
    path = run.directory / "workers" / f"worker_{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UserError(
            f"run_dir = {str(run.directory)!r}: can't be written to on the node {node()} ({error.strerror}); see to it "
            "that all nodes of the cluster may"
        ) from None
    with file as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} on {node()}, process {os.getpid()}\n".encode())
        log.flush()
        print(f"All else that this worker writes is in {path.absolute()}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)


def _wait_for_lock(directory: RunDirectory, console: DeskConsole) -> None:
    end, told = time.monotonic() + _LOCK_SECONDS, False
    while time.monotonic() < end:
        try:
            with directory.locked():
                return
        except UserError as error:
            if not told:
                console.note(f"waiting, up to {_LOCK_SECONDS:g} s: {error}")
            told = True
            time.sleep(0.5)


def node() -> str:
    """The address of this process's node."""
    import ray

    return ray.util.get_node_ip_address()
