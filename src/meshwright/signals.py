"""Ctrl-C and SIGTERM: finish the step, save, then stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Whether a signal has asked for an end; `signal` is its number, 0 while there was none."""

    signal: int = 0


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note the first SIGINT or SIGTERM instead of dying of it; the second one raises KeyboardInterrupt at once.

    Off the main thread signals can't be caught, and nothing is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: object) -> None:
        if stop.signal:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
