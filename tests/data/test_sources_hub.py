import json
import os
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.config_data import SourceKeys
from meshwright.data import hub
from meshwright.data.sources import open_source
from meshwright.errors import UserError

TEXTS = [f"document {number}" for number in range(20)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.fixture(params=["parquet", "json", "csv", "saved", "saved dict"])
def folder(request, tmp_path) -> Path:
    path = tmp_path / "data set"
    path.mkdir()
    train = datasets.Dataset.from_dict({"id": range(20), "text": TEXTS, "content": TEXTS[::-1]})
    test = datasets.Dataset.from_dict({"id": [1], "text": ["held out"], "content": ["x"]})
    if request.param == "saved":
        train.save_to_disk(path)
    elif request.param == "saved dict":
        datasets.DatasetDict({"train": train, "test": test}).save_to_disk(path)
    else:
        for name, rows in {"train": train, "test": test}.items():
            getattr(rows, f"to_{request.param}")(
                path / f"{name}.{'jsonl' if request.param == 'json' else request.param}"
            )
    return path


def texts(spec: str, **keys) -> list[str]:
    return [document.text or document.fault for document in open_source(spec, SourceKeys(**keys)).documents()]


def test_a_folder_and_its_splits(folder):
    spec = f"hf:{folder}"
    assert texts(spec) == TEXTS and texts(f"{spec}::train") == TEXTS
    assert texts(spec, field="content") == TEXTS[::-1]
    assert texts(f"{spec}::train[:25%]") == TEXTS[:5]
    assert texts(f"{spec}::train[3:5]+train[18:]") == TEXTS[3:5] + TEXTS[18:]
    if (folder / "state.json").is_file():
        return
    assert texts(f"{spec}::test") == ["held out"]
    assert texts(f"{spec}::train+test") == [*TEXTS, "held out"]


def test_going_on_from_any_place(folder, monkeypatch):
    monkeypatch.setattr(hub, "BATCH_ROWS", 3)
    for split in ("train", "train[2:9]", "train[:2]+train[4:9]"):
        source = open_source(f"hf:{folder}::{split}")
        everything = list(source.documents())
        assert everything[1].name == f"hf:{folder}::{split}#2" and everything[1].place == (0, 2)
        for number in {0, 1, 2, 5, len(everything) - 1}:
            assert list(source.documents(after=everything[number].place)) == everything[number + 1 :]
        assert [document for part in source.parts() for document in part.documents()] == everything


def test_a_column_that_is_not_there(folder):
    # Where the library doesn't know the columns beforehand, it is found row by row.
    faults = {document.fault for document in open_source(f"hf:{folder}", SourceKeys(field="body")).documents()}
    assert faults in ({"missing field (body; there are id, text, content)"}, {"missing field (body)"})


def test_what_is_said_of_a_whole_dataset_is_said_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.csv").write_text("id,text\n", encoding="utf-8")
    datasets.Dataset.from_dict({"body": ["x", "y"]}).save_to_disk(tmp_path / "missing field")
    for name in ("empty", "missing field"):
        source = open_source(f"hf:{tmp_path / name}")
        (document,) = source.documents()
        assert document.fault.startswith(name)
        assert list(source.documents(after=document.place)) == []


def test_the_fingerprint_follows_the_files_the_split_and_the_keys(folder):
    def fingerprint(spec: str, **keys) -> str:
        return open_source(spec, SourceKeys(**keys)).describe()["fingerprint"]

    before = fingerprint(f"hf:{folder}")
    moved = folder.rename(folder.with_name("moved"))
    assert fingerprint(f"hf:{moved}") == fingerprint(f"hf:{moved}::train") == before
    others = [fingerprint(f"hf:{moved}::test"), fingerprint(f"hf:{moved}", field="content")]
    os.utime(next(moved.rglob("*.*")), (1, 1))
    assert len({before, *others, fingerprint(f"hf:{moved}")}) == 4


def test_a_config_with_a_slash_is_a_folder_within(tmp_path):
    for language in ("rust", "python"):
        (tmp_path / "data" / language).mkdir(parents=True)
        table = pyarrow.table({"content": [f"{language} code"], "licenses": [["mit"]]})
        pyarrow.parquet.write_table(table, tmp_path / "data" / language / "data.parquet")
    assert texts(f"hf:{tmp_path}:data/rust:train", field="content") == ["rust code"]


def test_a_config_by_name(tmp_path):
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("one", "two")]
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n", encoding="utf-8")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    assert texts(f"hf:{tmp_path}:two") == texts(f"hf:{tmp_path}:two:train") == ["two"]


def test_rows_that_cannot_be_used_leave_the_others(tmp_path):
    table = pyarrow.table({"text": pyarrow.array(["good", "", "a\0b", None, "x" * 2000, "good"])})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    assert texts(f"hf:{tmp_path}", max_document_mb=0.001) == [
        "good",
        "empty",
        "NUL byte (at 1)",
        "missing field (text is null)",
        "too large (2,000 bytes; data.max_document_mb = 0.001)",
        "good",
    ]


def test_conversations(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"id": 1, "messages": turns}) + "\n", encoding="utf-8")
    (document,) = open_source(f"hf:{tmp_path}", SourceKeys(chat="chatml")).documents()
    assert list(document.messages) == turns and not document.text and not document.fault


def test_a_dataset_of_the_hub_is_asked_for_by_its_parts(monkeypatch):
    asked = []

    def load(**arguments):
        asked.append(arguments)
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        return rows.to_iterable_dataset() if arguments["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    for spec, (config, data_dir, split, streamed) in {
        "hf:a/b": (None, None, "train", True),
        "hf:a/b:sample": ("sample", None, "train", True),
        "hf:a/b:sample:test": ("sample", None, "test", True),
        "hf:a/b::validation": (None, None, "validation", True),
        "hf:a/b:data/rust:train": (None, "data/rust", "train", True),
        "hf:a/b::train[:5%]": (None, None, "train[:5%]", False),
        "hf:a/b@v1.0:c": ("c", None, "train", True),
    }.items():
        assert texts(spec) == TEXTS
        expected = {"path": "a/b", "name": config, "data_dir": data_dir, "split": split, "streaming": streamed}
        assert asked[-1] == {**expected, "revision": "v1.0" if "@" in spec else None}


def test_the_fingerprint_of_a_dataset_of_the_hub_follows_its_revision(monkeypatch):
    class Builder:
        hash = "1234"

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda **_: Builder)
    first = open_source("hf:a/b").describe()["fingerprint"]
    assert open_source("hf:a/c").describe()["fingerprint"] != first
    Builder.hash = "5678"
    assert open_source("hf:a/b").describe()["fingerprint"] != first


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    for spec, words in {
        "hf:": "must be hf:<dataset>",
        "hf:a:b:c:d": "must be hf:<dataset>",
        "hf:no-one/nothing": "can't be read from row 1 on: ",
        f"hf:{tmp_path}::test": "can't be read from row 1 on: ValueError: Bad split",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            list(open_source(spec, key="data.validation").documents())
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"data.validation = {spec!r}")
    with pytest.raises(UserError, match="can't be read: "):
        open_source("hf:no-one/nothing").describe()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs datasets; pip install 'meshwright\[datasets\]'"):
        open_source(f"hf:{tmp_path}")
