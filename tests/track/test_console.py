import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from meshwright.track.console import Console, PlainConsole, Summary, make_console
from meshwright.track.rich_console import RichConsole
from meshwright.track.text import clock, short, visible

RECORD = {
    "step": 120,
    "loss": 2.34561,
    "learning_rate": 1e-3,
    "grad_norm": 0.711,
    "tokens": 245760,
    "tokens_per_second": 12345.4,
    "step_seconds": 0.1,
}
EVALUATION = {"step": 200, "val_loss": 2.5, "val_perplexity": 12.18, "val_bits_per_byte": 1.25}
HOSTILE = "[bold]x[/bold] [/] [link=http://x]y[/link] \x1b[31mred\x07 a\\[b]\n\tend"


class Stream(io.StringIO):
    """A stream that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


def tell(console: Console) -> None:
    """A whole run."""
    console.prepare_progress("tokenize", 0, 2_000_000, 0, 0)
    console.prepare_progress("tokenize", 2_000_000, 2_000_000, 500_000, 12)
    console.start("small", {"engine": "jax on 1 CPU", "data": "[red]texts"}, total_steps=1000, start_step=100)
    console.progress(119)
    console.step(RECORD)
    console.evaluation(EVALUATION)
    console.sample(200, "def ", HOSTILE)
    console.note("checkpoint saved: [bold]runs/small")
    console.finish(Summary(Path("runs/small"), 1000, 83.4, "def ", val_loss=2.5, val_bits_per_byte=1.25))
    console.close()
    console.close()


def told_plainly() -> str:
    stream = io.StringIO()
    tell(make_console(stream))
    return stream.getvalue()


def told_richly(width: int = 100) -> str:
    stream = Stream()
    tell(RichConsole(Terminal(file=stream, width=width, force_terminal=True)))
    return stream.getvalue()


def without_escapes(text: str) -> str:
    return re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text)


def test_plain_output_has_no_control_characters() -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told_plainly())


def test_plain_record_is_one_line_with_every_field() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.start("small", {}, total_steps=1000, start_step=0)
    stream.truncate(0)
    stream.seek(0)
    by_source = {"epochs": 1.0, "epochs/web": 1.0, "tokens/web": 1.0, "expert_load/0": 1.0}  # would be too many
    console.step({**RECORD, "mfu": 0.4123, "entropy": 1.5, **by_source})
    assert stream.getvalue() == (
        "step 120/1000   loss 2.3456  lr 1.0e-03  grad 0.71  12,345 tokens/s  mfu 41.2%  entropy 1.5  eta 0:01:28\n"
    )


def test_plain_record_without_throughput() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.start("small", {}, total_steps=10, start_step=0)
    console.step({"step": 1, "loss": float("nan")})
    assert stream.getvalue().endswith("step 1/10   loss nan  eta -:--:--\n")


def test_plain_time_left_counts_from_the_first_step_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("meshwright.track.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.start("small", {}, total_steps=100, start_step=0)
    now[0] = 160.0  # compilation
    console.progress(1)
    now[0] = 180.0
    console.step({"step": 11, "loss": 1.0, "step_seconds": 99.0})
    assert "eta 0:02:58" in stream.getvalue()


def test_plain_tells_the_whole_run() -> None:
    text = told_plainly()
    for expected in (
        "tokenize  100%  2.0/2.0 MB  500,000 tokens  12 documents  ",
        "small\n  engine  jax on 1 CPU\n  data    [red]texts\n",
        "resuming at step 100/1000\n",
        "step 200/1000   validation loss 2.5000  perplexity 12.18  1.2500 bits per byte\n",
        "  | def [bold]x[/bold] [/] [link=http://x]y[/link] ␛[31mred␇ a\\[b]\n  | \tend\n",
        "checkpoint saved: [bold]runs/small\n",
        "  time        0:01:23\n  validation  loss 2.5000, 1.2500 bits per byte\n",
        "  next        meshwright generate runs/small --prompt 'def '\n              meshwright report runs/small\n",
    ):
        assert expected in text


def test_plain_prepare_shows_few_lines() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    for done in range(1001):
        console.prepare_progress("tokenize", done, 1000, done, 1)
    console.prepare_progress("tokenize", 1000, 1000, 1000, 1)
    assert stream.getvalue().count("\n") == 1


def prepared(console: Console, monkeypatch: pytest.MonkeyPatch, total: int | None = 100_000_000) -> None:
    """Ten seconds of a preparation that goes on where an earlier call left off."""
    now = [100.0]
    monkeypatch.setattr("meshwright.track.console.time.monotonic", lambda: now[0])
    console.prepare_progress("train tokenizer", 90_000_000, total, 0, 4_000)
    now[0] = 130.0
    console.prepare_progress("encode", 40_000_000, total, 10_000_000, 4_000)
    now[0] = 140.0
    console.prepare_progress("encode", 60_000_000, total, 15_000_000, 6_000)


def test_plain_prepare_shows_speeds_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    prepared(PlainConsole(stream), monkeypatch)
    assert stream.getvalue() == (
        "encode   60%  60.0/100.0 MB  15,000,000 tokens  6,000 documents  2.0 MB/s  500,000 tokens/s  eta 0:00:20\n"
    )
    stream = io.StringIO()
    prepared(PlainConsole(stream), monkeypatch, total=None)
    assert stream.getvalue() == ("encode  60.0 MB  15,000,000 tokens  6,000 documents  2.0 MB/s  500,000 tokens/s\n")


@pytest.mark.parametrize("total", [100_000_000, None])
def test_rich_prepare_shows_a_bar_with_speeds_and_the_time_left(monkeypatch: pytest.MonkeyPatch, total) -> None:
    stream = Stream()
    console = RichConsole(Terminal(file=stream, width=100, force_terminal=True))
    prepared(console, monkeypatch, total)
    console.note("documents left out: 3 duplicates")
    console.close()
    text = without_escapes(stream.getvalue())
    left = "0:00:20 left" if total else "-:--:-- left"
    last = [line for line in re.split(r"[\r\n]", text) if line.startswith("encode")][-1]
    assert "6,000 documents  2.0 MB/s  500,000 tokens/s" in last and last.rstrip().endswith(left)
    assert ("60%" in last) == bool(total) and "━" in last
    assert "documents left out: 3 duplicates" in text and max(map(len, re.split(r"[\r\n]", text))) <= 100


def test_plain_survives_a_stream_of_another_encoding() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="cp1252", newline="\n")
    console = make_console(stream)
    console.sample(1, "é", "日本 \udc80")
    console.close()
    assert raw.getvalue().decode("cp1252").endswith("  | é?? \ufffd\n".replace("\ufffd", "?"))


@pytest.mark.parametrize("width", [80, 120])
def test_rich_shows_the_run_on_any_width(width: int) -> None:
    text = without_escapes(told_richly(width))
    assert "loss 2.3456" in text
    assert "12,345 tokens/s" in text
    assert "resuming at step 100 of 1,000" in text
    assert "validation loss 2.5000" in text
    assert "meshwright generate runs/small --prompt 'def '" in text
    assert max(len(line) for line in re.split(r"[\r\n]", text)) <= width


def test_rich_shows_text_as_it_is() -> None:
    text = told_richly()
    assert "[bold]x[/bold] [/] [link=http://x]y[/link] ␛[31mred␇ a\\[b]" in without_escapes(text)
    assert "checkpoint saved: [bold]runs/small" in without_escapes(text)
    assert "[red]texts" in without_escapes(text)
    assert "\x1b[31mred" not in text and "\x07" not in text


def test_rich_gives_the_cursor_back_after_an_error() -> None:
    stream = Stream()
    console = RichConsole(Terminal(file=stream, force_terminal=True))
    console.start("small", {}, 10, 0)
    console.close()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_rich_marks_the_best_evaluation() -> None:
    stream = Stream()
    console = RichConsole(Terminal(file=stream, force_terminal=True, width=100))
    console.start("small", {}, 10, 0)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 1.5)):
        console.evaluation({"step": step, "val_loss": loss})
    console.close()
    lines = [line for line in re.split(r"[\r\n]", without_escapes(stream.getvalue())) if "validation" in line]
    assert [line.rstrip().endswith("best") for line in lines] == [False, True, False, True]


def test_a_terminal_gets_the_bar_and_all_else_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_console(Stream()), RichConsole)
    assert isinstance(make_console(Stream("cp1252")), PlainConsole)
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_console(Stream()), PlainConsole)


def test_progress_costs_less_than_twenty_microseconds() -> None:
    console = RichConsole(Terminal(file=Stream(), force_terminal=True))
    console.start("small", {}, 20_000, 0)
    before = time.thread_time()
    for step in range(20_000):
        console.progress(step)
    assert (time.thread_time() - before) / 20_000 < 20e-6
    console.close()


def test_plain_lines_need_no_rich() -> None:
    code = (
        "import io, sys; from meshwright.track.console import make_console; make_console(io.StringIO());"
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_words() -> None:
    assert [clock(s) for s in (0, 83.4, 3600 * 26 + 59.6, float("nan"), float("inf"))] == [
        "0:00:00",
        "0:01:23",
        "26:01:00",
        "-:--:--",
        "-:--:--",
    ]
    assert [short(n) for n in (0, 0.0006, 12.3456, 12345, 1234567, 8.03e9, float("nan"))] == [
        "0",
        "0.0006",
        "12.35",
        "12,345",
        "1.23M",
        "8.03B",
        "not finite",
    ]
    assert visible("a\r\nb\tc\rd\x85\u202e") == "a\nb\tc␍d\ufffd\ufffd"
