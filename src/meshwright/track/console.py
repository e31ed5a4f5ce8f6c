"""What a person sees of a run: a live bar on a terminal, plain lines everywhere else."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, Protocol, TextIO

from meshwright.track.metrics import PER_SOURCE
from meshwright.track.text import clock, visible

_TRAINING_KEYS = {
    *("step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "mfu", "epochs")
}
_PREPARE_SECONDS = 5.0


@dataclass(frozen=True)
class Summary:
    """What a finished run came to."""

    run_dir: Path | str
    step: int
    """Steps done, those before a resume included."""
    seconds: float
    """Time that this call took; a resumed run's earlier calls are not in it."""
    prompt: str = ""
    """What to suggest to go on from."""
    stopped: bool = False
    """Whether it ended before its last step."""
    val_loss: float | None = None
    """Nats a token at the last evaluation; None: there was none."""
    val_bits_per_byte: float | None = None


class Console(Protocol):
    """Where a run tells how it goes. Calls come from one thread; `start` comes before the steps, `close` last."""

    def start(self, run: str, header: dict[str, str], total_steps: int, start_step: int) -> None:
        """Say what is about to run.

        Arguments:
            run: the run's name.
            header: facts in the order to show them, such as `{"engine": "jax on 1 CPU", "parameters": "1.2M"}`.
            total_steps: the count of steps done when the run is over.
            start_step: the count of steps done already; more than 0 when the run resumes.
        """

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a training record (see `MetricsLog`)."""

    def progress(self, step: int) -> None:
        """Note that so many steps are done. Cheap enough for every step."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation record (see `MetricsLog`)."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show what the model wrote (`text`) after a prompt."""

    def note(self, text: str) -> None:
        """Show one line, such as `checkpoint saved`."""

    def prepare_progress(
        self, stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int
    ) -> None:
        """Show how far the preparation of data is.

        Arguments:
            stage: what is being done, such as `encode`.
            done_bytes: read in this stage so far, by earlier calls too where the work was gone on with.
            total_bytes: what this stage reads; None: not known.
            tokens: tokens written so far.
            documents: documents read so far.
        """

    def finish(self, summary: Summary) -> None:
        """Say where the run lies, what it came to, and what to type next."""

    def close(self) -> None:
        """Give the terminal back as it was, also after an error; harmless when called twice."""


class PrepareSpeed:
    """How fast data is being prepared: since the first report of a stage."""

    def __init__(self) -> None:
        self._first = ("", 0.0, 0, 0)

    def update(self, stage: str, done_bytes: int, total_bytes: int | None, tokens: int) -> tuple[list[str], float]:
        """Take a report.

        Arguments:
            stage: as all of these, see `Console.prepare_progress`.
            done_bytes: see there.
            total_bytes: see there.
            tokens: see there.

        Returns:
            The speeds in words, and the seconds left (NaN: not known). With the first report of a stage, none are.
        """
        now = time.monotonic()
        if stage != self._first[0]:
            self._first = (stage, now, done_bytes, tokens)
        _, start, first_bytes, first_tokens = self._first
        seconds, read, made = now - start, done_bytes - first_bytes, tokens - first_tokens
        if seconds <= 0 or read <= 0:
            return [], nan
        words = [f"{read / seconds / 1e6:,.1f} MB/s"]
        if made:
            words.append(f"{made / seconds:,.0f} tokens/s")
        return words, (total_bytes - done_bytes) * seconds / read if total_bytes else nan


def make_console(stream: TextIO | None = None) -> Console:
    """The console that suits a stream.

    Arguments:
        stream: where to write; None: standard output.

    Returns:
        A live one for a terminal, else plain lines (pipes, files, notebooks).
    """
    stream = stream or sys.stdout
    can_draw = stream.isatty() and os.environ.get("TERM") != "dumb" and _encoding(stream).startswith("utf")
    if not can_draw:
        return PlainConsole(stream)
    from rich.console import Console as Terminal

    from meshwright.track.rich_console import RichConsole

    return RichConsole(Terminal(file=stream))


class PlainConsole:
    """One line for each thing that happens; no colours, no cursor movement.

    Arguments:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = 0
        self._first: tuple[int, float] | None = None
        self._stage: tuple[str, bool] = ("", False)
        self._stage_shown = 0.0
        self._speed = PrepareSpeed()

    def start(self, run: str, header: dict[str, str], total_steps: int, start_step: int) -> None:
        """See `Console`."""
        self._total, self._first = total_steps, None
        self._rows(run, list(header.items()))
        if start_step:
            self._line(f"resuming at step {start_step}/{total_steps}")

    def step(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        parts = [*record_parts(record), f"eta {clock(self._seconds_left(record))}"]
        self._line("  ".join([self._position(record["step"]), *parts]))

    def progress(self, step: int) -> None:
        """See `Console`."""
        if self._first is None:
            self._first = (step, time.monotonic())

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """See `Console`."""
        self._line("  ".join([self._position(record["step"]), *evaluation_parts(record)]))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """See `Console`."""
        self._line(f"{self._position(step)}  sample")
        for line in visible(prompt + text).split("\n"):
            self._line(f"  | {line}")

    def note(self, text: str) -> None:
        """See `Console`."""
        self._line(visible(text))

    def prepare_progress(
        self, stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int
    ) -> None:
        """See `Console`."""
        now, done = time.monotonic(), total_bytes is not None and done_bytes >= total_bytes > 0
        speeds, left = self._speed.update(stage, done_bytes, total_bytes, tokens)
        if stage != self._stage[0]:
            self._stage, self._stage_shown = (stage, False), now
        if (done and not self._stage[1]) or now - self._stage_shown >= _PREPARE_SECONDS:
            self._stage, self._stage_shown = (stage, done), now
            share = f"{done_bytes / total_bytes:4.0%}  " if total_bytes else ""
            size = f"{done_bytes / 1e6:,.1f}" + (f"/{total_bytes / 1e6:,.1f} MB" if total_bytes else " MB")
            counts = f"{stage}  {share}{size}  {tokens:,} tokens  {documents:,} documents"
            rest = [] if done or isnan(left) else [f"eta {clock(left)}"]
            self._line("  ".join([counts, *speeds, *rest]))

    def finish(self, summary: Summary) -> None:
        """See `Console`."""
        self._rows("stopped" if summary.stopped else "done", finish_rows(summary))

    def close(self) -> None:
        """See `Console`."""
        self._stream.flush()

    def _seconds_left(self, record: Mapping[str, Any]) -> float:
        step = record["step"]
        self.progress(step)
        assert self._first is not None
        first_step, first_time = self._first
        # The first step holds the compilation, so the clock starts after it; until then a step's own time must do.
        elapsed = time.monotonic() - first_time
        seconds = elapsed / (step - first_step) if step > first_step else record.get("step_seconds", nan)
        return (self._total - step) * seconds

    def _position(self, step: int) -> str:
        return f"step {step}/{self._total}".ljust(len(f"step {self._total}/{self._total}"))

    def _rows(self, title: str, rows: list[tuple[str, str]]) -> None:
        self._line(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._line(f"  {name:<{width}}  {value}")

    def _line(self, text: str) -> None:
        # What a stream's encoding lacks (cp1252 on a Windows pipe) must not end a training.
        encoding = _encoding(self._stream)
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def record_parts(record: Mapping[str, Any]) -> list[str]:
    """A training record in words, the step left out: what both consoles and a log show.

    Arguments:
        record: see `MetricsLog`; only `step` and `loss` must be there.
    """
    parts = [f"loss {record['loss']:.4f}"]
    for key, form in (
        ("learning_rate", "lr {:.1e}"),
        ("grad_norm", "grad {:.2f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("mfu", "mfu {:.1%}"),
    ):
        if key in record:
            parts.append(form.format(record[key]))
    more = {key: value for key, value in record.items() if key not in _TRAINING_KEYS}
    many = ("expert_load/", *PER_SOURCE)  # as many as experts, or sources
    more = {key: value for key, value in more.items() if not key.startswith(many)}
    return parts + [f"{key} {value:.4g}" for key, value in more.items()]


def evaluation_parts(record: Mapping[str, Any]) -> list[str]:
    """An evaluation record in words, the step left out.

    Arguments:
        record: see `MetricsLog`; only `step` and `val_loss` must be there.
    """
    parts = [f"validation loss {record['val_loss']:.4f}"]
    if "val_perplexity" in record:
        parts.append(f"perplexity {record['val_perplexity']:,.2f}")
    if "val_bits_per_byte" in record:
        parts.append(f"{record['val_bits_per_byte']:.4f} bits per byte")
    return parts


def finish_rows(summary: Summary) -> list[tuple[str, str]]:
    """What a finished run came to, as names and values in the order to show them.

    Arguments:
        summary: the run's.
    """
    folder = shlex.quote(str(summary.run_dir))
    rows = [("run", str(summary.run_dir)), ("steps", f"{summary.step:,}"), ("time", clock(summary.seconds))]
    if summary.val_loss is not None:
        bits = "" if summary.val_bits_per_byte is None else f", {summary.val_bits_per_byte:.4f} bits per byte"
        rows.append(("validation", f"loss {summary.val_loss:.4f}{bits}"))
    prompt = f" --prompt {shlex.quote(summary.prompt)}" if summary.prompt else ""
    rows.append(("next", f"meshwright generate {folder}{prompt}"))
    rows.append(("", f"meshwright report {folder}"))
    return rows


def _encoding(stream: TextIO) -> str:
    return (getattr(stream, "encoding", None) or "utf-8").lower()
