import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import sources
from meshwright.data.sources import Document, open_source
from meshwright.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "b.txt": "two\r\n",
        "a.txt": "one",
        "deep/er/c.md": "drei ü",
        ".hidden": "no",
        ".git/x": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\xff")
    return tmp_path


def test_folder(folder):
    assert list(open_source(str(folder)).documents()) == [
        Document("a.txt", "one"),
        Document("b.txt", "two\r\n"),
        Document("deep/er/c.md", "drei ü"),
        Document("image.bin", "", "not UTF-8 (byte 0)"),
    ]


def test_file(folder):
    assert list(open_source(str(folder / "b.txt")).documents()) == [Document("b.txt", "two\r\n")]


def test_glob(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert [d.name for d in open_source("*.txt").documents()] == ["a.txt", "b.txt"]
    assert [d.name for d in open_source("**/*.[mt]*").documents()] == ["a.txt", "b.txt", "deep/er/c.md"]


def test_python_stdlib():
    source = open_source("python-stdlib")
    names = [document.name for document in source.documents()]
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any({"test", "tests", "site-packages"} & set(Path(name).parts) for name in names)
    assert (Path(sysconfig.get_paths()["stdlib"]) / "unittest" / "case.py").is_file() and "unittest/case.py" in names
    assert source.describe()["bytes"] > 5_000_000


def test_separator(tmp_path):
    (tmp_path / "a.txt").write_text("one<|end|>two<|end|><|end|>three", encoding="utf-8")
    source = open_source(str(tmp_path), "<|end|>")
    assert [document.text for document in source.documents()] == ["one", "two", "", "three"]
    assert [document.name for document in source.documents()] == ["a.txt#0", "a.txt#1", "a.txt#2", "a.txt#3"]


@given(
    data=st.text("ab", max_size=60).map(str.encode),
    separator=st.text("ab", min_size=1, max_size=4),
    chunk=st.integers(1, 9),
)
def test_separators_across_chunks(tmp_path_factory, data, separator, chunk):
    path = tmp_path_factory.mktemp("chunks") / "file"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk)
        parts = [document.text for document in open_source(str(path), separator).documents()]
    assert parts == data.decode().split(separator)


def test_a_broken_part_leaves_the_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one|\xff\xfe|three")
    documents = list(open_source(str(tmp_path / "a.txt"), "|").documents())
    assert [document.text for document in documents] == ["one", "", "three"]
    assert [bool(document.fault) for document in documents] == [False, True, False]


def test_the_fingerprint_follows_the_files_and_not_their_place(folder, tmp_path_factory):
    before = open_source(str(folder)).describe()
    assert before["files"] == 4 and before["bytes"] == sum(d.stat().st_size for d in folder.rglob("[a-z]*.[a-z]*"))
    moved = tmp_path_factory.mktemp("moved") / "corpus"
    folder.rename(moved)
    assert open_source(str(moved)).describe()["fingerprint"] == before["fingerprint"]
    os.utime(moved / "a.txt", (1, 1))
    assert open_source(str(moved)).describe()["fingerprint"] != before["fingerprint"]


def test_mistakes_are_one_line(tmp_path):
    for spec, words in {
        str(tmp_path / "none.txt"): "no such file or folder",
        str(tmp_path / "*.txt"): "matches no file",
        str(tmp_path): "holds no files",
        "": "no such file or folder",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            open_source(spec, key="data.validation")
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"data.validation = {spec!r}")
