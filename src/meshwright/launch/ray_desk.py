"""Between the driver of a run on Ray and its workers: what the workers have to say, and whether they are to stop."""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshwright.signals import Stop
from meshwright.track.console import Summary

BEAT_SECONDS = 0.5
"""Seconds between two beats of a worker."""

CLOSED = -1
"""In place of a signal: this process is to end at once."""

_LOST_SECONDS = 60.0
_PATIENCE_SECONDS = 10.0
_MOST_CALLS = 200  # of a message: Ray puts large ones into its object store, which may be full
_MEASURED = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second"}


@dataclass(frozen=True)
class Failure:
    """What ended a run, and isn't mended by starting again."""

    worker: int
    node: str
    text: str
    """The line of a user's mistake, or a traceback."""
    mistake: bool
    """Whether it is a user's."""


@dataclass
class News:
    """What has come to the desk since it was last asked."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Methods of a console to call, with their arguments."""
    failure: Failure | None = None
    silence: float = 0.0
    """Seconds since a worker was last heard of."""
    placed: bool = False
    """Whether all workers have a place and have been started there."""


class Desk:
    """An actor that the driver makes; when the driver ends it is gone, by which the workers know."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._failure: Failure | None = None
        self._open = True
        self._stop = 0
        self._placed = False
        self._heard = time.monotonic()
        self._beats: Counter[int] = Counter()

    def is_open(self) -> bool:
        """Whether workers are still to train: nothing has ended the run."""
        return self._open

    def close(self) -> None:
        """Have workers end that are still there, or come to be."""
        self._open = False

    def workers_are(self, placed: bool) -> None:
        """Note that all workers have their places, or don't any more; from then on they are waited for anew."""
        self._placed, self._heard = placed, time.monotonic()

    def say(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Have the driver's console called; after a failure no more, as what follows from it isn't worth saying."""
        if self._failure is None:
            self._calls += calls

    def beat(self, rank: int, calls: list[tuple[str, tuple[Any, ...]]]) -> int:
        """Note that a worker is alive, and what it has to `say`; gives the signal that asks all to stop, 0, or
        `CLOSED`."""
        self._heard = time.monotonic()
        self._beats[rank] += 1
        self.say(calls)
        return self._stop if self._open else CLOSED

    def beats(self) -> Counter[int]:
        """How often each worker has beaten."""
        return self._beats

    def fail(self, failure: Failure) -> None:
        """Note what has ended the run; the first counts."""
        self._failure, self._open = self._failure or failure, False

    def failure(self) -> Failure | None:
        """What has ended the run; None: nothing."""
        return self._failure

    def ask_to_stop(self, signal: int) -> None:
        """Have the workers stop together, and save."""
        self._stop = signal

    def news(self) -> News:
        """What has come since the last call."""
        calls, self._calls = self._calls, []
        return News(calls, self._failure, time.monotonic() - self._heard, self._placed)


class DeskConsole:
    """The console of a worker: has that of the driver called.

    What is said goes with the next beat, so that training waits for no message; what a worker that is killed has said
    since its last beat is just in the run directory.

    Arguments:
        desk: the actor.
        moving: whether the run is to go on elsewhere, so that its end here is none that a person should see.
    """

    def __init__(self, desk: Any, moving: Callable[[], bool]) -> None:
        self._desk = desk
        self._moving = moving
        self._run = ""
        self._sending = threading.Lock()  # what was said first goes first, whichever thread sends it
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.moved = time.monotonic()
        """When something was last said, a step done or anything else, or last prepared."""
        self.stepped = False
        """Whether a step was done."""

    def start(self, run: str, header: dict[str, str], total_steps: int, start_step: int) -> None:
        """See `Console`."""
        self._run = run
        self._say("start", run, header, total_steps, start_step)

    def step(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        self._say("step", dict(record))

    def progress(self, step: int) -> None:
        """See `Console`."""
        self.stepped = True
        self._say("progress", step)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        self._say("evaluation", dict(record))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """See `Console`."""
        self._say("sample", step, prompt, text)

    def note(self, text: str) -> None:
        """See `Console`."""
        self._say("note", text)

    def prepare_progress(
        self, stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int
    ) -> None:
        """See `Console`; nothing is said, as the driver has prepared, and shown how."""
        self.moved = time.monotonic()

    def finish(self, summary: Summary) -> None:
        """See `Console`."""
        if not self._moving():
            self._say("finish", summary)

    def close(self) -> None:
        """See `Console`; waits until all is said."""
        import ray

        more = True  # at first even without a call: a beat may be on its way with the last
        while more:
            with self._sending:
                said = self._desk.say.remote(self._take())
            with suppress(ray.exceptions.RayError):
                ray.get(said, timeout=_LOST_SECONDS)
            more = bool(self._calls)

    def beat(self, rank: int) -> Any:
        """Send a beat of this worker with what is to be said; gives Ray's reference to the answer of `Desk.beat`."""
        with self._sending:
            return self._desk.beat.remote(rank, self._take())

    def _say(self, method: str, *arguments: Any) -> None:
        self.moved = time.monotonic()
        self._calls.append((method, arguments))

    def _take(self) -> list[tuple[str, tuple[Any, ...]]]:
        calls = [self._calls.popleft() for _ in range(min(len(self._calls), _MOST_CALLS))]
        # Of how far training is, just the last is of interest.
        progress = [call for call in calls if call[0] == "progress"]
        calls = [call for call in calls if call[0] != "progress" or call is progress[-1]]
        records = [arguments[0] for method, arguments in calls if method == "step"]
        for record in records[-1:]:
            for key in _MEASURED & record.keys():
                measure(key).set(record[key], {"run": self._run})
        return calls


@lru_cache
def measure(key: str) -> Any:
    """What a Ray cluster tells Prometheus as `ray_meshwright_<key>`; by run."""
    from ray.util.metrics import Gauge

    return Gauge(f"meshwright_{key}", description=f"{key} of a training run", tag_keys=("run",))


def all_others_live(desk: Any, rank: int, size: int) -> bool:
    """Whether every other worker still beats; a second or more passes.

    Arguments:
        desk: the actor.
        rank: of this worker.
        size: how many there are.
    """
    import ray

    before: Counter[int] = ray.get(desk.beats.remote())
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        since = ray.get(desk.beats.remote()) - before
        # One may have been on its way.
        if all(since[other] > 1 for other in range(size) if other != rank):
            return True
        time.sleep(BEAT_SECONDS / 2)
    return False


def keep_in_touch(console: DeskConsole, rank: int, stop: Stop, look: Callable[[], None]) -> None:
    """Beat, in a thread of its own, for as long as this process lives; a process without a driver ends.

    Arguments:
        console: sends the beats.
        rank: of this worker.
        stop: set to the signal that asks all to stop.
        look: called at each beat.
    """
    threading.Thread(target=_beat, args=(console, rank, stop, look), name="beat", daemon=True).start()


def _beat(console: DeskConsole, rank: int, stop: Stop, look: Callable[[], None]) -> None:
    import ray

    heard = time.monotonic()
    while True:
        try:
            asked = ray.get(console.beat(rank), timeout=_LOST_SECONDS / 4)
            if asked == CLOSED:
                os._exit(1)
            stop.signal = stop.signal or asked
            heard = time.monotonic()
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):  # it may come back
            if time.monotonic() - heard > _LOST_SECONDS:
                os._exit(1)
        except Exception:  # the driver is gone, and the run directory may be another's by now
            os._exit(1)
        look()
        time.sleep(BEAT_SECONDS)
