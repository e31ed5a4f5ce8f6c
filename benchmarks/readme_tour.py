"""Plays the README's commands and puts what they print into its output blocks.

    python benchmarks/readme_tour.py           # a few minutes: `make demo` runs in full
    python benchmarks/readme_tour.py --draft   # two minutes: a demo of 40 steps

Needs an environment with Meshwright in it. The commands run in a temporary copy of what they read, with a `.venv`
whose `meshwright` and `python` are this environment's. In the README:

- each line of an `sh` block is a command; a `python` block is a script;
- `<!-- exit 1 -->` before a block says how its last command ends, if not with 0;
- `<!-- output -->` before a `text` block: what the block above printed goes there. With
  `<!-- output: first 5, then from "done" -->` the lines between are cut, up to the last line that holds those words.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COPIED = ("examples", "Makefile", "pyproject.toml", "requirements")
READER = "~/meshwright"  # stands for the temporary folder in what is shown
NOT_PLAYED = ("make test",)  # would run the tests that play the README

_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n+)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Block:
    """A fenced block of the README."""

    kind: str
    text: str
    note: str
    span: tuple[int, int]
    """Where its text lies in the page."""

    @property
    def commands(self) -> list[str]:
        """The commands of an `sh` block."""
        return self.text.replace("\\\n", "").splitlines() if self.kind == "sh" else []

    @property
    def exit_code(self) -> int:
        """How the block's last command is to end."""
        return int(self.note.removeprefix("exit ")) if self.note.startswith("exit ") else 0


@dataclass
class Played:
    """A block that was run."""

    block: Block
    output: str
    exit_code: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a Markdown page, in order."""
    return [
        Block(match["kind"], match["text"], match["note"] or "", match.span("text")) for match in _BLOCK.finditer(page)
    ]


def make_folder(folder: Path) -> None:
    """A folder like a fresh clone in which `make demo` has just installed everything.

    Arguments:
        folder: made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    binaries = folder / ".venv/bin"
    binaries.mkdir(parents=True)
    call = "from meshwright.cli import main; main(prog_name='meshwright')"
    _script(binaries / "meshwright", f'exec "{sys.executable}" -c "{call}" "$@"')
    _script(binaries / "python", f'exec "{sys.executable}" "$@"')
    (binaries / "activate").write_text(f'PATH="{binaries}:$PATH"\n')
    (folder / ".venv/base.done").touch()  # newer than what it depends on


def play(page: str, folder: Path) -> list[Played]:
    """Run the README's blocks in order.

    Arguments:
        page: the README's text.
        folder: from `make_folder`.

    Returns:
        A record for each `sh` and `python` block that was run.
    """
    played = []
    for block in blocks(page):
        if block.kind not in ("sh", "python") or any(command in NOT_PLAYED for command in block.commands):
            continue
        first = block.commands[0] if block.commands else "python"
        print(f"playing: {first}", file=sys.stderr, flush=True)
        is_script = block.kind == "python"
        done = subprocess.run(
            [sys.executable, "-c", block.text] if is_script else ["bash", "-e", "-c", block.text],
            cwd=folder,
            env={**os.environ, "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{folder}/.venv"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
        played.append(Played(block, _as_a_reader_sees(done.stdout, folder), done.returncode))
        if done.returncode != block.exit_code:
            raise RuntimeError(f"{first!r} ended with {done.returncode}, not {block.exit_code}:\n{done.stdout[-3000:]}")
    return played


def with_outputs(page: str, played: list[Played]) -> str:
    """The page with its output blocks filled."""
    outputs = {one.block.span: one.output for one in played}
    parts, end, last = [], 0, ""
    for block in blocks(page):
        last = outputs.get(block.span, last)
        if block.kind == "text" and block.note.startswith("output"):
            parts += [page[end : block.span[0]], _cut(last, block.note)]
            end = block.span[1]
    return "".join([*parts, page[end:]])


def make_draft(folder: Path) -> None:
    """Shorten the demo of a folder from `make_folder`."""
    path = folder / "examples/stdlib.toml"
    text = re.sub(r"(?m)^steps = \d+", "steps = 40", path.read_text())
    path.write_text(re.sub(r"(?m)^(eval_every|sample_every|every) = \d+", r"\1 = 20", text))


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _as_a_reader_sees(output: str, folder: Path) -> str:
    for path, shown in ((sys.executable, f"{READER}/.venv/bin/python"), (str(folder), READER)):
        output = output.replace(path, shown)
    lines = [line.rstrip() for line in output.splitlines() if not line.startswith("make")]
    return "\n".join(lines) + "\n"


def _cut(output: str, note: str) -> str:
    lines = output.rstrip("\n").split("\n")
    if match := re.fullmatch(r'output: first (\d+), then from "(.*)"', note):
        first = int(match[1])
        last = max((number for number, line in enumerate(lines) if match[2] in line), default=len(lines))
        if last > first + 1:
            lines = [*lines[:first], "…", *lines[last:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", action="store_true", help="a demo of 40 steps in place of the whole")
    draft = parser.parse_args().draft
    page = README.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "meshwright"
        make_folder(folder)
        if draft:
            make_draft(folder)
        played = play(page, folder)
    README.write_text(with_outputs(page, played), encoding="utf-8")


if __name__ == "__main__":
    main()
