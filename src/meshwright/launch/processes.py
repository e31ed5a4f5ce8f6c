"""Several processes of one machine that train one model: start them, watch them, leave none behind."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from meshwright.config import Run, make_run
from meshwright.errors import UserError
from meshwright.launch import joining
from meshwright.launch.addresses import LOOPBACK
from meshwright.signals import Stop, stop_signals
from meshwright.track.text import visible

# SIGINT ends a worker by its default action, without a traceback, until the trainer catches it. `-P`: no module of the
# current folder is taken for one of Python's.
WORKER = [
    *[sys.executable, "-P", "-c"],
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from meshwright.launch.processes import main; main()",
]
"""The command of a worker; its rank, the number of workers, the port and the parent's process id follow."""

USER_ERROR = 78
"""Exit code of a worker that has shown a user's mistake, or a file that can't be used, as its line."""

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 0.5
_SAME_ERROR_SECONDS = 5.0
_TERM_SECONDS = 3.0
_LOG_LINES, _LOG_BYTES = 20, 16384


def train_in_processes(run: Run, command: Sequence[str] = WORKER) -> int:
    """Train a run in `launch.workers` processes of this machine, and wait for them.

    Worker 0 writes to this process's standard output and error, the others to `workers/worker_<i>.log` in the run
    directory. The first SIGINT or SIGTERM goes to worker 0, and the workers stop together; another, a second or more
    later, ends them at once. When a worker fails, the others are ended, and standard error says which, and how. When
    this process ends, however it does, so do they.

    Arguments:
        run: a checked run file with `launch.kind = "processes"`.
        command: starts a worker; see `WORKER`. The run comes to its standard input, as TOML.

    Returns:
        The exit code: 0 where every worker ended with 0; 130 or 143 where SIGINT or SIGTERM stopped them; else 1.

    Raises:
        UserError: there are too few cards, or the run directory can't be written to.
        KeyboardInterrupt, SystemExit: a second signal came; every worker has been ended.
    """
    shares = joining.shares_of_cards(run)
    with ExitStack() as closing:
        stop = closing.enter_context(stop_signals())
        crew = _Crew(run.directory / "workers")
        closing.callback(crew.close)
        port = closing.enter_context(reserved_port())
        for rank, share in enumerate(shares):
            arguments = map(str, (rank, len(shares), port, os.getpid()))
            crew.start([*command, *arguments], share, run.to_toml().encode())
        return crew.wait(stop)


def main() -> None:
    """A worker's whole life; its arguments are as `WORKER` says."""
    rank, size, port, parent = map(int, sys.argv[1:])
    end_with(parent)
    keep_stdout_to_python()
    try:
        code = _train(sys.stdin.buffer.read().decode(), rank, size, port)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(USER_ERROR)
    except OSError as error:  # as the command shows it
        print(f"error: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        leave(USER_ERROR)
    except BaseException:
        traceback.print_exc()
        leave(1)
    sys.exit(code)


def end_with(parent: int) -> None:
    """Have this process killed when another ends, even by SIGKILL.

    Arguments:
        parent: id of the process that started this one, from the thread that waits for it.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine's loopback that no other program gets, but a server that shares ports (gRPC,
    `addresses.listen`) can use."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


@dataclass(eq=False)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    log_start: int

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0, *_STOPPED)

    @property
    def suspicion(self) -> int:
        """How likely it didn't fail for another's sake, 0 the most: a process that is killed takes none with it before
        it is gone, but those that miss it fail, and JAX aborts them."""
        code = self.process.returncode
        return 1 if code > 0 else 2 if code == -signal.SIGABRT else 0

    def how(self) -> str:
        code = self.process.returncode
        if code == USER_ERROR:
            return "stopped with an error"
        if code > 0:
            return f"ended with exit code {code}"
        return f"was killed by {_signal_name(-code)}" + (
            ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        )

    def where(self) -> str:
        if self.log is None:
            return "Its output is above."
        with self.log.open("rb") as log:
            log.seek(max(self.log_start, self.log.stat().st_size - _LOG_BYTES))
            text = log.read().decode(errors="replace")
        lines = [f"  {line}" for line in visible(text).splitlines()[-_LOG_LINES:]]
        return "\n".join([f"Its log is {self.log}" + ("; it ends:" if lines else "."), *lines])


class _Crew:
    """The workers of a run.

    Arguments:
        folder: for their logs.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []

    def start(self, command: list[str], variables: dict[str, str], text: bytes) -> None:
        rank = len(self._workers)
        # Unbuffered, so that the last words of a worker that is killed are in its log.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        with ExitStack() as closing:
            path = self._folder / f"worker_{rank}.log" if rank else None
            log = closing.enter_context(_opened(path)) if path else None
            # In a session of its own the terminal's Ctrl-C doesn't reach it.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            self._workers.append(_Worker(rank, process, path, log.tell() if log else 0))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(text)

    def wait(self, stop: Stop) -> int:
        forwarded = False
        while True:
            self._look()
            if any(worker.failed for worker in self._ended):
                return self._failure(stop)
            if not self._running:
                return self._workers[0].process.returncode or max(w.process.returncode for w in self._workers)
            if stop.signal and not forwarded:
                forwarded = True
                self._workers[0].process.send_signal(stop.signal)
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._kill()
        if sys.stdout.isatty() and any(worker.process.returncode < 0 for worker in self._workers[:1]):
            print("\x1b[?25h", end="")  # its live bar had hidden the cursor

    def _kill(self) -> None:
        for worker in self._running:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()

    @property
    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _look(self) -> None:
        self._ended += [w for w in self._workers if w not in self._ended and w.code is not None]

    def _look_until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and self._running and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            self._look()

    def _failure(self, stop: Stop) -> int:
        primary = self._workers[0]
        if any(worker.code == USER_ERROR for worker in self._ended):  # it is about to be shown by worker 0, too
            self._look_until(lambda: primary in self._ended, _SAME_ERROR_SECONDS)
        else:
            self._look_until(lambda: False, _SETTLE_SECONDS)
        failed = [worker for worker in self._ended if worker.failed]
        self._stop()
        if stop.signal and primary in failed and primary.code == -stop.signal:  # before the trainer caught any
            return 128 + stop.signal
        culprit = min(failed, key=lambda worker: worker.suspicion)
        if not culprit.code == primary.code == USER_ERROR:
            who = f"worker {culprit.rank} (process {culprit.process.pid})"
            text = f"error: {who} {culprit.how()}, and all were stopped. {culprit.where()}"
            print(_fresh_line() + text, file=sys.stderr)
        return 1

    def _stop(self) -> None:
        for worker in self._running:
            worker.process.terminate()
        self._look_until(lambda: False, _TERM_SECONDS)
        self._kill()


@contextmanager
def _opened(log: Path) -> Iterator[IO[bytes]]:
    # To append: a run that is refused since another trains in the folder must not empty the other's logs.
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        raise UserError(f"run_dir = {str(log.parent.parent)!r}: can't be written to: {error.strerror}") from None
    with file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        file.flush()
        yield file


def _train(text: str, rank: int, size: int, port: int) -> int:
    from meshwright.api import train

    run = make_run(tomllib.loads(text))
    joining.prepare(run)
    group = joining.join(run, f"{LOOPBACK}:{port}", rank, size)
    outcome = train(run, group=group)
    joining.leave(run, group)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def keep_stdout_to_python() -> None:
    """Keep what libraries write on C's standard output out of this process's, from now on."""
    # Gloo says there, amid the trainer's lines or bar, each time that it has connected.
    own = sys.stdout
    sys.stdout = open(os.dup(1), "w", buffering=1, encoding=own.encoding, errors=own.errors)  # noqa: SIM115  (for good)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def leave(code: int) -> NoReturn:
    """End this process at once: an ordinary exit would wait for the other workers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _fresh_line() -> str:
    return "\n" if sys.stdout.isatty() else ""  # below the bar of a worker that was killed


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
