"""A trace of some steps: what the devices and the host did in them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from meshwright.config import Run


class Profile(ExitStack):
    """Traces the steps that `profile.steps` names; to be entered, so that a trace is whole however training ends.

    Arguments:
        run: `profile.steps` is read.
        trace: an engine's, given the folder to write into.
        folder: where the trace goes; None: this process writes none.
    """

    def __init__(self, run: Run, trace: Callable[[Path], AbstractContextManager], folder: Path | None):
        super().__init__()
        self._steps = range(run.profile.steps[0], run.profile.steps[1] + 1) if run.profile.steps else range(0)
        self._trace, self._folder, self._running = trace, folder, False

    @contextmanager
    def of(self, step: int, finish: Callable[[], None]) -> Iterator[None]:
        """Around the dispatch of a step.

        Arguments:
            step: its number.
            finish: waits until the device has done all steps dispatched. All processes do, those that write no trace
                too: what a step says of the others must reach them at the same step.
        """
        if step in self._steps and not self._running:
            finish()
            if self._folder is not None:
                self.enter_context(self._trace(self._folder))
            self._running = True
        yield
        if self._running and step == self._steps[-1]:
            finish()
            self.close()
            self._running = False
