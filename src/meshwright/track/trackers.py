"""Every place that a run's records go to, as one."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from meshwright.config import Run
from meshwright.rundir import RunDirectory
from meshwright.track.board import TensorBoardLog
from meshwright.track.console import Console, PlainConsole, Summary
from meshwright.track.metrics import MetricsLog, SamplesLog


class Trackers:
    """Writes records to the console, `log.txt`, `metrics.jsonl`, `samples.jsonl`, and TensorBoard where asked.

    Arguments:
        run: `name`, `train.steps` and `track` are read.
        directory: the run's; None: in a process that another one speaks for. Nothing is shown or written then.
        console: the one a person watches; it stays open.

    Raises:
        UserError: a tracker that the run asks for isn't installed.
    """

    def __init__(self, run: Run, directory: RunDirectory | None, console: Console):
        self._run = run
        self._closing = ExitStack()
        self._logs: list[MetricsLog | TensorBoardLog] = []
        self._samples: list[SamplesLog] = []
        self._consoles: tuple[Console, ...] = ()
        if directory is None:
            return
        if run.track.tensorboard:
            self._logs.append(TensorBoardLog(directory.tensorboard))
        self._logs.append(MetricsLog(directory.metrics))
        self._samples.append(SamplesLog(directory.samples))
        for log in (*self._logs, *self._samples):
            self._closing.callback(log.close)
        log_file = PlainConsole(self._closing.enter_context(directory.log.open("a", encoding="utf-8")))
        self._consoles = (console, log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            for log_file in self._consoles[1:]:
                log_file.note(f"ended by {kind.__name__}: {error}")
        self._closing.close()

    def start(self, header: dict[str, str], start: int) -> None:
        """See `Console.start`; what was logged after step `start` is dropped, since those steps run again."""
        for log in (*self._logs, *self._samples):
            log.truncate_after(start)
        for console in self._consoles:
            console.start(self._run.name, header, self._run.train.steps, start)

    def step(self, record: Mapping[str, Any]) -> None:
        """Log a training record."""
        for log in self._logs:
            log.append(record)
        for console in self._consoles:
            console.step(record)

    def progress(self, step: int) -> None:
        """See `Console.progress`."""
        for console in self._consoles:
            console.progress(step)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Log an evaluation record."""
        for log in self._logs:
            log.append(record)
        for console in self._consoles:
            console.evaluation(record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Log what the model wrote after a prompt."""
        for log in self._samples:
            log.append({"step": step, "prompt": prompt, "text": text})
        for console in self._consoles:
            console.sample(step, prompt, text)

    def note(self, text: str) -> None:
        """Say a line."""
        for console in self._consoles:
            console.note(text)

    def finish(self, summary: Summary) -> None:
        """See `Console.finish`."""
        for console in self._consoles:
            console.finish(summary)
