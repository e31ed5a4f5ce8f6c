"""Ctrl-C and SIGTERM: finish the step, save, then stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Whether a signal has asked for an end; `signal` is its number, 0 while there was none."""

    signal: int = 0
    at: float = 0.0


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note the first SIGINT or SIGTERM instead of dying of it; another, a second or more later, ends it
    at once. (Some programs send a signal to a process and to its group, so it comes twice.)

    Off the main thread signals can't be caught, and nothing is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: object) -> None:
        if not stop.signal:
            stop.signal, stop.at = number, time.monotonic()
        elif time.monotonic() - stop.at > 1.0:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
