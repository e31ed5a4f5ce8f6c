"""`meshwright data`: what it shows is what the model gets, and can be read."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import MAIN, meshwright, run_values, write_corpus, write_run
from rich.console import Console as Terminal
from rich.style import Style

import meshwright as mw
from meshwright.data.loader import TrainData, eval_batches
from meshwright.data.prepare import prepare
from meshwright.data.show import Piece, View, _Decoding, look
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.errors import UserError
from meshwright.track.view import draw, plain_lines


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "texts")
    return tmp_path


def make(train: object = "texts", length: int = 32, data: dict | None = None, **train_keys):
    return mw.make_run(
        run_values(
            "texts",
            data={"train": train, **(data or {})},
            model={"context_length": 1024},
            train={"sequence_length": length, **train_keys},
        )
    )


def view_of(run, count: int = 3, split: str = "train") -> View:
    return look(prepare(run), run, count, split)


def text_of(example) -> str:
    return "".join(piece.text for part in example.parts for piece in part.pieces)


def lines_from(shown: str) -> list[str]:
    """The lines of the examples, without the header."""
    return shown.split("\n\n", 1)[1].splitlines()


def write_chat(path, turns: list[tuple[str, str]]) -> None:
    rows = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in turns]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")


def test_help_shows_an_example(tmp_path):
    done = meshwright("data", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "  meshwright data " in done.stdout.split("Example:")[1]


CONVERSATION = """tiny, train
  source   chat.jsonl: 82 tokens in 1 document
  packing  packed, 96 places a sequence, 15.62% of places are padding; attention within a document
  marks    ⟦not learned⟧  ⟨<|endoftext|>⟩ end of text  ↵ end of a line

example 1 of step 1: 22 tokens learned
  + document 1, positions 0 to 80
  | ⟦<|im_start|>user↵⟧
  | ⟦Why?↵⟧
  | ⟦Say.<|im_end|>↵⟧
  | ⟦<|im_start|>assistant↵⟧
  | So.↵
  | ␛[2J ü<|im_end|>⟦↵⟧
  | ⟨<|endoftext|>⟩
  + 15 places of padding
"""


def test_a_conversation_on_a_pipe(here):
    write_chat(here / "chat.jsonl", [("Why?\nSay.", "So.\n\x1b[2J ü")])
    run = make("chat.jsonl", 96, {"chat": "chatml", "packing": "packed", "validation": 0})
    (here / "run.toml").write_text(run.to_toml())
    done = meshwright("data", "run.toml", "--show", "1", cwd=here)
    assert (done.returncode, done.stdout) == (0, CONVERSATION), done.stderr
    assert "\x1b" not in done.stderr and "1 documents" in done.stderr  # progress goes there


def test_imports_no_engine(here):
    write_run(here / "run.toml", run_values("texts"))
    code = """
import sys
from meshwright.cli import main
try:
    main(["data", "run.toml"], prog_name="meshwright")
except SystemExit as end:
    assert not end.code
print("IMPORTED", *[name for name in ("flax", "optax", "torch", "ray", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "IMPORTED", done.stdout + done.stderr


def test_a_reader_that_goes_away_is_no_error(here):
    write_run(here / "run.toml", run_values("texts", train={"batch_size": 64}))
    command = subprocess.list2cmdline([*MAIN[:1], "-c"])
    shell = f'set -o pipefail; {command} "$0" data run.toml --show 3000 train.steps=2000 | head -1'
    done = subprocess.run(["bash", "-c", shell, MAIN[2]], cwd=here, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "tiny, train\n"), done.stderr
    assert "Broken" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("packing", "document_mask"), [("stream", True), ("padded", True), ("packed", True), ("packed", False)]
)
def test_it_is_what_training_and_evaluation_read(here, packing, document_mask):
    write_corpus(here / "more", documents=30, seed=1)
    sources = [{"source": "texts", "weight": 2}, {"source": "more", "weight": 1}]
    run = make(sources, 300, {"packing": packing, "document_mask": document_mask}, eval_batches=1)
    corpus = prepare(run)
    for split, batch in (("train", TrainData(corpus, run).batch(0)), ("validation", next(eval_batches(corpus, run)))):
        view = look(corpus, run, 4, split)
        assert [one.learned for one in view.examples] == (batch.weights_BT > 0).sum(axis=1).tolist()
        for row, example in enumerate(view.examples):
            assert (example.step, example.row) == (1, row + 1)
            places = 300 - example.padding
            learned = batch.targets_BT[row][batch.weights_BT[row] > 0]
            shown = "".join(p.text for part in example.parts for p in part.pieces if p.learned and not p.special)
            assert shown == ByteTokenizer().decode(learned)
            assert sum(len(part.positions) for part in example.parts) == places
            if batch.segments_BT is not None:
                assert example.padding == (batch.segments_BT[row] == 0).sum()
                positions = [position for part in example.parts for position in part.positions]
                assert positions == batch.positions_BT[row, :places].tolist()
            ended = sum(piece.special for part in example.parts for piece in part.pieces)
            assert ended == sum(part.ends for part in example.parts) == (learned == 256).sum()
    assert {one.source for one in look(corpus, run, 4).examples} == {"texts", "more"}
    assert look(corpus, run, 4).padding == pytest.approx(TrainData(corpus, run).padding)


def test_a_source_is_named_where_there_are_several(here):
    write_corpus(here / "more", documents=30, seed=1)
    shown = list(plain_lines(view_of(make([{"source": "texts"}, {"source": "more"}]), 2)))
    assert re.fullmatch(r"  sources  texts: [\d,]+ tokens in \d+ documents", shown[1])
    assert re.fullmatch(r"           more: [\d,]+ tokens in \d+ documents", shown[2])
    titles = [line for line in shown if line.startswith("example")]
    assert sorted(re.sub(r"example \d", "", title) for title in titles) == [
        f" of step 1, from {name}: 32 tokens learned" for name in ("more", "texts")
    ]


def test_more_than_a_batch_goes_on_in_the_next(here):
    run = make(steps=3)
    examples = view_of(run, 9).examples
    assert [(one.step, one.row) for one in examples] == [(1 + i // 4, 1 + i % 4) for i in range(9)]
    data = TrainData(prepare(run), run)
    assert text_of(examples[8])[1:] == ByteTokenizer().decode(data.batch(2).targets_BT[0])
    assert len(view_of(run, 99).examples) == 12  # the run has no more


def test_documents_of_a_stream_have_borders(here):
    (here / "short.txt").write_text("|".join(f"{number}\n" for number in range(200)))
    view = view_of(make("short.txt", data={"validation": 0, "separator": "|"}), 12)
    lines = list(plain_lines(view))
    borders = [i for i, line in enumerate(lines) if line.startswith("  + another document, positions ")]
    assert len(borders) > 10
    for i in borders:
        assert lines[i - 1].endswith("⟨<|endoftext|>⟩") or lines[i - 1].endswith("⟨<|endoftext|>⟩⟧")
    firsts = [example.parts[0].pieces[0].learned for example in view.examples]
    assert not any(firsts)


def test_padding_is_counted_and_not_printed(here):
    (here / "texts").joinpath("short.txt").write_text("ab")
    run = make("texts/short.txt", data={"packing": "padded", "validation": 0})
    assert lines_from("\n".join(plain_lines(view_of(run, 1)))) == [
        "example 1 of step 1: 2 tokens learned",
        "  | ⟦a⟧b⟨<|endoftext|>⟩",
        "  + 30 places of padding",
    ]


def test_what_is_cut_says_so(here):
    (here / "long.txt").write_text("x" * 48)
    for packing, remark in (("padded", "cut here"), ("packed", "cut here; the document goes on in another example")):
        view = view_of(make("long.txt", data={"packing": packing, "validation": 0}), 2)
        assert f"  + {remark}" in list(plain_lines(view))


def test_an_end_of_text_that_is_not_learned_is_no_padding(here):
    write_chat(here / "chat.jsonl", [("a", "b")])
    line = json.loads((here / "chat.jsonl").read_text())
    line["messages"].append({"role": "user", "content": "c"})
    (here / "chat.jsonl").write_text(json.dumps(line) + "\n")
    run = make("chat.jsonl", 160, {"packing": "padded", "validation": 0, "chat": "chatml"})
    lines = list(plain_lines(view_of(run, 1)))
    assert lines[-2] == "  | ⟦⟨<|endoftext|>⟩⟧"
    tokens = prepare(run).train_tokens
    assert lines[-1] == f"  + {160 - (tokens - 1)} places of padding"


def test_pieces_of_characters_and_tokens_without_text():
    decoding = _Decoding(ByteTokenizer(), "stream")
    ids = [*"aü".encode(), 256, 0xC3, 300]
    assert decoding._pieces(ids, [False, True, False, True, True, True]) == [
        Piece("aü", False),  # as the token that completes it
        Piece("<|endoftext|>", True, True),
        Piece("\N{REPLACEMENT CHARACTER}", True),
        Piece("token 300", True, True),
    ]


def test_on_a_terminal_what_is_not_learned_is_dim(here):
    write_chat(here / "chat.jsonl", [("Why?", "[bold]So.\x1b[2J " + "long " * 30)])
    run = make("chat.jsonl", 256, {"packing": "packed", "validation": 0, "chat": "chatml"})
    out = io.StringIO()
    terminal = Terminal(file=out, record=True, force_terminal=True, width=60, color_system="standard")
    draw(view_of(run, 1), terminal)
    dim: dict[str, bool] = {}
    for segment in terminal._record_buffer:
        dim[segment.text] = bool((segment.style or Style()).dim)
    assert dim["Why?<|im_end|>↵"] and dim["<|im_start|>assistant↵"]
    said = next(text for text in dim if text.startswith("[bold]So.␛[2J "))
    assert not dim[said] and "\x1b[2J" not in out.getvalue()
    plain = terminal.export_text()
    assert max(map(len, plain.splitlines())) <= 60
    assert re.search(r"\n│ [ong l]+\n", plain)  # wrapped within the margin
    assert "\n├─ document 1, positions 0 to " in plain and re.search(r"\n└─ \d+ places of padding\n", plain)


def test_nothing_held_out_is_a_mistake(here):
    run = make(data={"validation": 0})
    with pytest.raises(UserError, match=r"data\.validation = 0\.0: nothing is held out"):
        view_of(run, 1, "validation")
    assert np.isclose(view_of(run, 1).padding, 0)
