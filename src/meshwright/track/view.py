"""Examples as a person reads them: what isn't learned is dim on a terminal, and between marks everywhere else."""

import os
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console as Terminal
from rich.text import Text

from meshwright.data.show import Example, Part, Piece, View
from meshwright.track.console import PlainConsole, make_console
from meshwright.track.text import visible

LINE_BREAK = "↵"


def show_view(view: View, stream: TextIO | None = None) -> None:
    """Print examples.

    Arguments:
        view: what `meshwright.data.show.look` found.
        stream: where to; None: standard output. A reader that goes away, such as `head`, ends it.
    """
    stream = stream or sys.stdout
    console = make_console(stream)
    try:
        if isinstance(console, PlainConsole):
            for line in plain_lines(view):
                console.note(line)
        else:
            draw(view, Terminal(file=stream))
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left in the buffer goes there


def plain_lines(view: View) -> Iterator[str]:
    """A view as lines without colours: `⟦not learned⟧`, `⟨token that is no text⟩`, `↵` at a line's end.

    Arguments:
        view: the examples.
    """
    rows = facts(view)
    width = max(len(name) for name, _ in rows)
    yield f"{view.run}, {view.split}"
    for name, value in rows:
        yield f"  {name:<{width}}  {value}"
    yield f"  {'marks':<{width}}  ⟦not learned⟧  ⟨{view.end_of_text}⟩ end of text  {LINE_BREAK} end of a line"
    for example in view.examples:
        yield ""
        yield title(view, example)
        for number, part in enumerate(example.parts, 1):
            if label := part_label(view, number, part):
                yield f"  + {label}"
            for line in lines_of(part):
                yield f"  | {''.join(_plain(piece) for piece in line)}"
        for remark in remarks(view, example):
            yield f"  + {remark}"


def draw(view: View, terminal: Terminal) -> None:
    """Show a view on a terminal, long lines wrapped.

    Arguments:
        view: the examples.
        terminal: where to draw.
    """
    rows = facts(view)
    width = max(len(name) for name, _ in rows)
    terminal.print(Text.assemble((view.run, "bold cyan"), (f"  {view.split}", "cyan")))
    for name, value in rows:
        terminal.print(Text.assemble((f"  {name:<{width}}  ", "dim"), visible(value)))
    legend = Text.assemble("learned  ", ("not learned", "dim"), "  ", (view.end_of_text, "magenta"), " end of text")
    terminal.print(Text.assemble((f"  {'marks':<{width}}  ", "dim"), legend))
    for example in view.examples:
        terminal.print()
        terminal.print(Text(visible(title(view, example)), style="bold"))
        for number, part in enumerate(example.parts, 1):
            if label := part_label(view, number, part):
                terminal.print(Text(f"├─ {label}", style="cyan"))
            for line in lines_of(part):
                text = Text.assemble(*(_styled(piece) for piece in line))
                for wrapped in text.wrap(terminal, max(terminal.width - 2, 8), overflow="fold", tab_size=4) or [Text()]:
                    terminal.print(Text.assemble(("│ ", "cyan"), wrapped))
        for remark in remarks(view, example):
            terminal.print(Text(f"└─ {remark}", style="cyan"))


def facts(view: View) -> list[tuple[str, str]]:
    """What there is to know of all examples, as names and values."""
    what = "pair" if view.packing == "pairs" else "document"
    sources = [f"{one.name}: {one.tokens:,} tokens in {_count(one.documents, what)}" for one in view.sources]
    padding = f"{view.padding:.2%} of places are padding"
    packing = f"{view.packing}, {view.sequence_length:,} places a sequence, {padding}"
    if view.packing == "packed":
        packing += f"; attention {'within a document' if view.document_mask else 'across documents'}"
    if view.packing == "pairs":
        packing += "; attention within a text"
    names = ["source" if len(sources) == 1 else "sources", *[""] * (len(sources) - 1)]
    return [*zip(names, sources, strict=True), ("packing", packing)]


def title(view: View, example: Example) -> str:
    """What an example is."""
    batch = "step" if view.split == "train" else "batch"
    source = f", from {example.source}" if len(view.sources) > 1 else ""
    learned = f"{_count(example.learned, 'token')} {'compared' if view.packing == 'pairs' else 'learned'}"
    return f"example {example.row} of {batch} {example.step}{source}: {learned}"


def part_label(view: View, number: int, part: Part) -> str:
    """What goes above a part of an example; empty: nothing."""
    if view.packing == "padded" or (view.packing == "stream" and number == 1):
        return ""
    name = f"document {number}" if view.packing == "packed" else "another document"
    if view.packing == "pairs":
        name = ("chosen", "rejected")[number - 1]
    if not part.positions:
        return f"{name}, to be predicted only"
    return f"{name}, positions {part.positions[0]} to {part.positions[-1]}"


def remarks(view: View, example: Example) -> Iterator[str]:
    """What goes below an example."""
    if view.packing != "stream" and not example.parts[-1].ends:
        yield "cut here" if view.packing == "padded" else "cut here; the document goes on in another example"
    if example.padding:
        yield f"{_count(example.padding, 'place')} of padding"


def lines_of(part: Part) -> Iterator[list[Piece]]:
    """The pieces of a part, line by line; a line break is shown at its end."""
    line: list[Piece] = []
    for piece in part.pieces:
        if piece.special:
            line.append(piece)
            continue
        *ended, rest = visible(piece.text).split("\n")
        for text in ended:
            yield [*line, piece._replace(text=text + LINE_BREAK)]
            line = []
        if rest:
            line.append(piece._replace(text=rest))
    if line:
        yield line


def _plain(piece: Piece) -> str:
    text = f"⟨{piece.text}⟩" if piece.special else piece.text
    return text if piece.learned else f"⟦{text}⟧"


def _styled(piece: Piece) -> tuple[str, str]:
    return visible(piece.text), " ".join(["magenta"] * piece.special + ["dim"] * (not piece.learned))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
