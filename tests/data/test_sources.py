import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config_data import SourceKeys
from meshwright.data import readers
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
        Document("a.txt", "one", place=(0, 0)),
        Document("b.txt", "two\r\n", place=(1, 0)),
        Document("deep/er/c.md", "drei ü", place=(2, 0)),
        Document("image.bin", "", "not UTF-8 (byte 0)", place=(3, 0)),
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
    source = open_source(str(tmp_path), SourceKeys(separator="<|end|>"))
    assert [document.text for document in source.documents()] == ["one", "two", "", "three"]
    assert [document.fault for document in source.documents()] == ["", "", "empty", ""]
    assert [document.name for document in source.documents()] == ["a.txt#0", "a.txt#1", "a.txt#2", "a.txt#3"]


def test_a_separator_at_the_end_begins_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("one|two|", encoding="utf-8")
    assert [d.text for d in open_source(str(tmp_path), SourceKeys(separator="|")).documents()] == ["one", "two"]


@given(
    data=st.text("ab", max_size=60).map(str.encode),
    separator=st.text("ab", min_size=1, max_size=4),
    chunk=st.integers(1, 9),
)
def test_separators_across_chunks(tmp_path_factory, data, separator, chunk):
    path = tmp_path_factory.mktemp("chunks") / "file"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk)
        parts = [document.text for document in open_source(str(path), SourceKeys(separator=separator)).documents()]
    *expected, last = data.decode().split(separator)
    assert parts == ([*expected, last] if last or not expected else expected)


def test_a_broken_part_leaves_the_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one|\xff\xfe|three")
    documents = list(open_source(str(tmp_path / "a.txt"), SourceKeys(separator="|")).documents())
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


def names(spec: Path | str, **keys) -> list[str]:
    return [document.name for document in open_source(str(spec), SourceKeys(**keys)).documents()]


def test_include_and_exclude(tmp_path):
    for path in ("src/a.rs", "src/deep/er/b.rs", "src/c.py", "tests/d.rs", "e.rs", "f.RS"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x", encoding="utf-8")
    assert names(tmp_path, include=["*.rs"]) == ["e.rs", "src/a.rs", "src/deep/er/b.rs", "tests/d.rs"]
    assert names(tmp_path, include=["**/*.rs"]) == names(tmp_path, include=["*.rs"])
    assert names(tmp_path, include=["src/**/*.rs"]) == ["src/a.rs", "src/deep/er/b.rs"]
    assert names(tmp_path, include=["*.rs"], exclude=["tests/"]) == ["e.rs", "src/a.rs", "src/deep/er/b.rs"]
    assert names(tmp_path, include=["*.rs"], exclude=["tests/*", "**/er/**"]) == ["e.rs", "src/a.rs"]
    assert names(tmp_path, include=["[ef].*", "c.py"]) == ["e.rs", "f.RS", "src/c.py"]
    assert names(f"{tmp_path}/s*/**/*", exclude=["src/deep/*"]) == ["a.rs", "c.py"]
    with pytest.raises(UserError, match=r"data.include = \['\*.c'\] .* leave no file") as caught:
        open_source(str(tmp_path), SourceKeys(include=["*.c"]))
    assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_what_comes_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "code": "b"}', encoding="utf-8")
    (tmp_path / "b.txt").write_text("c", encoding="utf-8")
    changes = [
        {},
        {"field": "code"},
        {"separator": "|"},
        {"max_document_mb": 1.0},
        {"strip_licence": True},
        {"chat": "chatml"},
        {"include": ["*.txt"]},
    ]
    prints = [open_source(str(tmp_path), SourceKeys(**change)).describe()["fingerprint"] for change in changes]
    assert len(set(prints)) == len(changes)
    assert prints[0] == open_source(str(tmp_path), SourceKeys(exclude=["none"])).describe()["fingerprint"]


def test_plain_text_keeps_the_fingerprint_that_earlier_stores_carry(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    os.utime(tmp_path / "a.txt", ns=(7, 7))
    expected = hashlib.sha256(b"a.txt\0" + b"3\0" + b"7\n").hexdigest()
    assert open_source(str(tmp_path)).describe()["fingerprint"] == expected


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    source = open_source(str(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: can't be read: No such file"):
        list(source.documents())


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    for name, module in {"a.parquet": "pyarrow", "a.txt.zst": "zstandard"}.items():
        (tmp_path / name).write_bytes(b"")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=rf"needs {module}; pip install 'meshwright\[datasets\]'"):
                open_source(str(tmp_path / name))
