"""What `docs/data.md` shows is true: its commands, its pieces of run files, its picture of the packing modes."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import numpy as np

import meshwright as mw
from meshwright.data.examples import open_examples
from meshwright.data.mixing import stages_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")

spec = importlib.util.spec_from_file_location("readme_tour", ROOT / "benchmarks/readme_tour.py")
tour = importlib.util.module_from_spec(spec)
sys.modules["readme_tour"] = tour
spec.loader.exec_module(tour)


def test_data_page_on_its_small_corpus(tmp_path):
    """Its commands run in order, and print what the page shows."""
    tour.make_folder(tmp_path / "clone")
    played = tour.play(PAGE, tmp_path / "clone")
    assert len([one for one in played if one.block.commands]) >= 5
    assert tour.with_outputs(PAGE, played) == PAGE


def test_pieces_of_run_files_on_the_data_page_can_be_used():
    pieces = [block.text for block in tour.blocks(PAGE) if block.kind == "toml"]
    assert len(pieces) >= 2
    runs = [mw.make_run({"name": "a", "model": {"preset": "gpt2"}, **tomllib.loads(piece)}) for piece in pieces]
    mixed = runs[-1].data.sources
    assert [one.weight for one in mixed] == [0.7, 0.2, 0.1]
    shares = {0: (7, 2, 1), 8000: (7, 2, 3), 9000: (7, 2, 5)}
    stages = stages_of([[(0, one.weight), *((later.step, later.weight) for later in one.later)] for one in mixed])
    assert dict(stages) == shares


def test_picture_of_the_packing_modes_is_true(tmp_path):
    drawn: dict[str, list[list[str]]] = {}
    for line in re.search(r"```\n(stream   a a.*?)```", PAGE, re.DOTALL)[1].splitlines():
        mode, row = line[:9].strip(), line[9:20].split()
        if row:
            drawn.setdefault(mode or list(drawn)[-1], []).append(row)
    assert {mode: len(rows) for mode, rows in drawn.items()} == {"stream": 2, "padded": 3, "packed": 3}
    for name in ("aaaa", "bb", "ccccccccc"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    for mode, rows in drawn.items():
        data = {"train": f"{tmp_path}/texts", "validation": 0, "packing": mode, "store": f"{tmp_path}/store"}
        sections = {"tokenizer": {"kind": "bytes"}, "model": {"preset": "gpt2-tiny"}, "train": {"sequence_length": 6}}
        run = mw.make_run({"name": "a", "data": data, **sections})
        examples = open_examples(mw.prepare(run).stores[0], "train", run)
        batch = examples.batch(np.arange(len(examples)))
        signs = np.where(batch.targets_BT == 256, ord("."), batch.targets_BT)
        signs = np.where(batch.weights_BT > 0, signs, ord("~"))
        assert sorted([chr(sign) for sign in row] for row in signs) == sorted(rows), mode
