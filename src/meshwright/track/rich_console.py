"""The console of a terminal: a live bar, with evaluations, samples and notes above it."""

import time
from collections.abc import Mapping
from math import nan
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console as Terminal
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from meshwright.track.console import PrepareSpeed, Summary, evaluation_parts, finish_rows
from meshwright.track.text import clock, visible

_REFRESH_HZ = 5
# Rich forgets older samples than this when it estimates the time left; steps of a large model are slow.
_SPEED_SECONDS = 600.0


class RichConsole:
    """A live bar; model text is shown as it is, never as markup.

    Arguments:
        terminal: where to draw.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._stages: dict[str, TaskID] = {}
        self._speed = PrepareSpeed()
        self._step = 0
        self._next_update = 0.0
        self._best: float | None = None

    def start(self, run: str, header: dict[str, str], total_steps: int, start_step: int) -> None:
        """See `Console`."""
        self.close()
        self._rows(run, list(header.items()))
        if start_step:
            self._terminal.print(Text(f"resuming at step {start_step:,} of {total_steps:,}", style="yellow"))
        self._step, self._best = start_step, None
        self._bar = self._make_bar(
            TextColumn("step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.fields[loss]}", style="bold", markup=False),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left", style="dim"),
        )
        # No record has come yet: the first step compiles, which takes a while.
        waiting = "first step …"
        self._task = self._bar.add_task("train", total=total_steps, completed=start_step, loss=waiting, speed="")

    def step(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        if self._bar is None:
            return
        speed = f"{record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
        self._bar.update(self._task, completed=self._step, loss=f"loss {record['loss']:.4f}", speed=speed)

    def progress(self, step: int) -> None:
        """See `Console`."""
        self._step = step
        now = time.monotonic()
        if now >= self._next_update and self._bar is not None:
            self._next_update = now + 1 / _REFRESH_HZ
            self._bar.update(self._task, completed=step)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        line = Text.assemble((f"step {record['step']:,}", "dim"), "  ", ("  ".join(evaluation_parts(record)), "green"))
        loss = record["val_loss"]
        if self._best is not None and loss < self._best:
            line.append("  best", style="bold green")
        self._best = loss if self._best is None else min(self._best, loss)
        self._terminal.print(line)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """See `Console`."""
        body = Text.assemble((visible(prompt), "bold"), visible(text))
        title = Text(f"sample at step {step:,}", style="dim")
        self._terminal.print(Panel(body, HORIZONTALS, title=title, title_align="left", border_style="dim"))

    def note(self, text: str) -> None:
        """See `Console`."""
        self._terminal.print(Text(visible(text), style="dim"))

    def prepare_progress(
        self, stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int
    ) -> None:
        """See `Console`."""
        if self._bar is None:
            self._bar = self._make_bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[counts]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("left", style="dim"),
            )
        if stage not in self._stages:
            self._stages[stage] = self._bar.add_task(stage, total=total_bytes or None, counts="", left=clock(nan))
        speeds, left = self._speed.update(stage, done_bytes, total_bytes, tokens)
        now = time.monotonic()
        if now >= self._next_update or done_bytes >= (total_bytes or 1):
            self._next_update = now + 1 / _REFRESH_HZ
            counts = "  ".join([f"{documents:,} documents", *speeds])
            self._bar.update(self._stages[stage], completed=done_bytes, counts=counts, left=clock(left))

    def finish(self, summary: Summary) -> None:
        """See `Console`."""
        self.close()
        self._rows("stopped" if summary.stopped else "done", finish_rows(summary))

    def close(self) -> None:
        """See `Console`."""
        if self._bar is None:
            return
        if not self._stages:
            self._bar.update(self._task, completed=self._step)
        self._bar.stop()
        self._bar, self._stages = None, {}

    def _make_bar(self, *columns: Any) -> Progress:
        bar = Progress(
            *columns,
            console=self._terminal,
            refresh_per_second=_REFRESH_HZ,
            speed_estimate_period=_SPEED_SECONDS,
            expand=True,
        )
        bar.start()
        return bar

    def _rows(self, title: str, rows: list[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, value in rows:
            grid.add_row(Text(f"  {name}", style="dim"), Text(value))
        self._terminal.print(Text(title, style="bold cyan"))
        self._terminal.print(grid)
