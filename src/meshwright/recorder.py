"""From what a step returns to what is logged. Values are read a step late, so the host never blocks the device."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshwright.config import Run
from meshwright.track.trackers import Trackers


class Recorder:
    """Reads each step's values once the next step is under way, and logs every so many.

    Arguments:
        run: `train.log_every`, `train.steps` and `train.on_nonfinite` are read.
        trackers: where records go.
        start: updates done before.
        tokens: tokens trained on before.
        taken: gives what else a record says of the data, from the count of steps done.
        token_seconds: what a token takes at the devices' peak; None: not known, and records have no `mfu`.
    """

    def __init__(
        self,
        run: Run,
        trackers: Trackers,
        start: int,
        tokens: int,
        taken: Callable[[int], Mapping[str, float]],
        token_seconds: float | None = None,
    ):
        self.step = start
        """The last step whose values were read."""
        self.loss = self.grad_norm = 0.0
        self.tokens = tokens
        """Tokens that counted, all steps read so far."""
        self.stop = 0
        """The signal by which the processes of the run have agreed to stop; 0: none."""
        self.finite = True
        """Whether training may go on: false once a loss or a gradient wasn't finite under `on_nonfinite = "stop"`."""
        self._run = run
        self._trackers = trackers
        self._taken = taken
        self._token_seconds = token_seconds
        self._first = start + 1
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._mark = (time.perf_counter(), start, tokens)
        self._away = 0.0

    def dispatched(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step that has just been dispatched, and read those of the one before."""
        self.flush()
        self._pending = (step, values)

    def flush(self) -> None:
        """Read the values of the last step dispatched; waits for the device to finish it."""
        if self._pending is not None and self.finite:  # what comes after a step that wasn't finite is of no use
            (step, values), self._pending = self._pending, None
            self._read(step, dict(_numbers(values)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Flush, and leave what happens inside out of the throughput."""
        self.flush()
        before = time.perf_counter()
        yield
        self._away += time.perf_counter() - before

    def _read(self, step: int, values: dict[str, float]) -> None:
        self.step, self.loss, self.grad_norm = step, values["loss"], values["grad_norm"]
        self.stop = int(values.pop("stop", 0))
        self.tokens += int(values["tokens"])
        finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        if not finite and self._run.train.on_nonfinite == "skip":
            self._trackers.note(f"step {step}: loss = {self.loss}, gradient norm = {self.grad_norm}: update skipped")
        elif not finite:
            self.finite = False
        self._trackers.progress(step)
        if step % self._run.train.log_every == 0 or step in (self._first, self._run.train.steps) or not finite:
            record = {"step": step, **values, "tokens": self.tokens, **self._taken(step), **self._speed(step)}
            self._trackers.step(record)

    def _speed(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        then, last_step, last_tokens = self._mark
        seconds, self._away = now - then - self._away, 0.0
        self._mark = (now, step, self.tokens)
        if step == self._first:  # most of it was compilation
            return {}
        speed = (self.tokens - last_tokens) / seconds
        mfu = {} if self._token_seconds is None else {"mfu": speed * self._token_seconds}
        return {"tokens_per_second": speed, "step_seconds": seconds / (step - last_step), **mfu}


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each value as a number; one with several numbers, such as a share for each expert, as `name/0`, `name/1`, ..."""
    for name, value in values.items():
        if np.ndim(value) == 0:
            yield name, float(value)
        else:
            yield from ((f"{name}/{index}", float(number)) for index, number in enumerate(np.asarray(value)))
