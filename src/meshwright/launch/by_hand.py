"""A worker of a run, of which each was started by hand or by Slurm, on as many machines as there are.

Nobody watches over them, so they watch each other: when one is gone, the others end.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import meshwright
from meshwright.config import Run
from meshwright.errors import UserError
from meshwright.launch import joining, slurm
from meshwright.launch.processes import keep_stdout_to_python, leave
from meshwright.launch.roll_call import Peers, roll_call
from meshwright.launch.shared_storage import check_shared
from meshwright.storage.store import is_remote

_OF_ONE_WORKER = ("launch.index", "launch.coordinator")  # the coordinator may have several names
_SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Place:
    """Which worker this process is."""

    run: Run
    """The run, with `launch.coordinator`, `index` and `workers` as they are."""
    variables: dict[str, str]
    """What the environment must say, so that it sees its own cards and no other's."""


def place_by_hand(run: Run, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Find out whether this process is one of several workers that are started each by itself.

    It is where `launch.kind` is `processes` and either `launch.coordinator` is given, or Slurm's `srun` started several
    tasks.

    Arguments:
        run: a checked run file.
        environment: where Slurm's variables are looked for.

    Returns:
        None: it isn't, and `meshwright.launch.processes` starts the workers.

    Raises:
        UserError: a key is missing, or says something else than Slurm does.
    """
    launch = run.launch
    if launch.kind != "processes":
        return None
    step = slurm.step_of(environment)
    if not launch.coordinator and step is None:
        if launch.index >= 0:
            raise UserError(
                f"launch.index = {launch.index}: needs launch.coordinator, the host:port of worker 0; set it in every "
                "worker, or leave launch.index out to have the workers started here"
            )
        return None
    index, workers = launch.index if launch.index >= 0 else None, launch.most or None
    if step is not None:
        for key, given, told in (("index", index, step.rank), ("workers", workers, step.size)):
            if given not in (None, told):
                raise UserError(f"launch.{key} = {given}: Slurm says {told}; leave the key out")
        index, workers = step.rank, step.size
    for key, number in (("index", index), ("workers", workers)):
        if number is None:
            raise UserError(
                f"launch.coordinator = {launch.coordinator!r}: needs launch.{key}, too: which worker this is, from 0, "
                "and how many there are; set both"
            )
    assert index is not None and workers is not None
    if index >= workers:
        raise UserError(f"launch.index = {index}: must be less than launch.workers = {workers}; count from 0")
    changes = {"coordinator": launch.coordinator or step.coordinator, "index": index, "workers": workers}  # type: ignore[union-attr]
    placed = run.model_copy(update={"launch": launch.model_copy(update=changes)})
    return Place(placed, _cards(run, step) if step else {})


def train_by_hand(place: Place) -> NoReturn:
    """Train as one of the workers, and end this process.

    Worker 0 writes to its terminal, each other one to `workers/worker_<i>.log` in the run directory. The exit code is 0
    where all steps are done, 130 or 143 where SIGINT or SIGTERM stopped the run (any worker's; all stop together and
    save), else 1.

    Arguments:
        place: see `place_by_hand`.
    """
    run, terminal = place.run, sys.stderr
    os.environ.update(place.variables)
    peers: list[Peers] = []
    try:
        peers.append(_meet(run))
        terminal = _to_log(run)
        peers[0].watch(lambda who: _end_for(who, terminal, run))
        code = _train(run)
    except BaseException as error:
        _fail(error, terminal, run, peers)
    peers[0].close()
    leave(code)


def _meet(run: Run) -> Peers:
    launch = run.launch
    facts = {key: value for key, value in _flat(run.model_dump(mode="json")).items() if key not in _OF_ONE_WORKER}
    facts["meshwright"] = meshwright.__version__
    return roll_call(launch.coordinator, launch.index, launch.processes, facts, launch.start_timeout)


def _train(run: Run) -> int:
    from meshwright.api import train

    launch = run.launch
    joining.prepare(run)
    group = joining.join(run, launch.coordinator, launch.index, launch.processes)
    found = joining.found(run)
    if found.processes != launch.processes:
        raise UserError(
            f"launch.workers = {launch.processes}: {found.framework} found {found.processes} of them; see that all use "
            "the same kind of device"
        )
    if not is_remote(run.run_dir):
        check_shared(run.directory, group)
    outcome = train(run, group=group)
    joining.leave(run, group)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _cards(run: Run, step: slurm.Step) -> dict[str, str]:
    if step.size_here == 1 or step.cards_are_bound:
        return {}
    here = run.launch.model_copy(update={"coordinator": "", "workers": step.size_here})
    return joining.shares_of_cards(run.model_copy(update={"launch": here}))[step.rank_here]


def _to_log(run: Run) -> TextIO:
    """Have what this worker says in its log, and give what leads to the terminal yet."""
    terminal = open(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="replace")  # noqa: SIM115
    if run.launch.index == 0:
        keep_stdout_to_python()
        return terminal
    log = _log_of(run)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        raise UserError(f"run_dir = {str(run.directory)!r}: can't be written to: {error.strerror}") from None
    print(f"worker {run.launch.index} of {run.launch.processes}: its log is {log}", file=terminal)
    with file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        file.flush()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    return terminal


def _log_of(run: Run) -> Path:
    return run.directory / "workers" / f"worker_{run.launch.index}.log"


def _end_for(who: str, terminal: TextIO, run: Run) -> NoReturn:
    _say(
        f"{who} is gone or has failed, so this one ends, too; the output or the log of that one says why", terminal, run
    )
    leave(1)


def _fail(error: BaseException, terminal: TextIO, run: Run, peers: list[Peers]) -> NoReturn:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1
        leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else code)
    if isinstance(error, UserError):
        _say(str(error), terminal, run)
        _part(peers, run)
    elif isinstance(error, OSError):  # as the command shows it
        _say(f"{error.filename or 'file'}: {error.strerror or error}", terminal, run)
        _part(peers, run)
    else:
        traceback.print_exception(error)
        if peers and peers[0].lost.wait(_SETTLE_SECONDS):
            _say(f"{peers[0].gone} is gone or has failed; its output or its log says why", terminal, run)
        elif run.launch.index:
            _say(f"worker {run.launch.index} failed: {type(error).__name__}", terminal, run)
    leave(1)


def _part(peers: list[Peers], run: Run) -> None:
    for one in peers:
        one.close(failed=True)
    if peers and run.launch.index == 0:
        time.sleep(_SETTLE_SECONDS)  # JAX ends the others as soon as this one is gone, also amid their last words


def _say(text: str, terminal: TextIO, run: Run) -> None:
    with suppress(OSError, ValueError):  # whoever read it may be gone
        print(f"error: {text}", file=sys.stderr, flush=True)
    if run.launch.index and terminal is not sys.stderr:
        with suppress(OSError, ValueError):
            print(f"error: {text}\nThe log of this one is {_log_of(run)}", file=terminal, flush=True)


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[above + key] = value
    return flat
