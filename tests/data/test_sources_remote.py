import gzip
import os
import pickle
import sys
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.config_data import SourceKeys
from meshwright.data.sources import open_source
from meshwright.errors import UserError

FILES = {
    "a.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "deep/b.jsonl.gz": gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'),
    "deep/er/c.txt.zst": zstandard.ZstdCompressor().compress(b"five"),
    "empty.txt": b"",
    ".hidden/d.txt": b"no",
}


@pytest.fixture
def parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["six", "seven"]}), sink, row_group_size=1)
    return sink.getvalue().to_pybytes()


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path, parquet):
    """A corpus in a real file system of fsspec."""
    root = f"memory://bucket-{tmp_path.name}/corpus" if request.param == "memory" else f"file://{tmp_path}/corpus"
    filesystem, path = fsspec.core.url_to_fs(root)
    for name, content in {**FILES, "p.parquet": parquet}.items():
        filesystem.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{path}/{name}", content)
    yield root
    filesystem.rm(path, recursive=True)


def texts(spec: str, **keys) -> list[str]:
    return [document.text or document.fault for document in open_source(spec, SourceKeys(**keys)).documents()]


def test_a_folder_a_file_and_a_glob_at_an_address(address):
    assert texts(address) == ["one", "two", "three", "four", "five", "empty", "six", "seven"]
    assert texts(address + "/") == texts(address)
    assert texts(f"{address}/a.jsonl") == ["one", "two"]
    assert texts(f"{address}/**/*.jsonl*") == ["one", "two", "three", "four"]
    assert texts(f"{address}/*/b.*") == ["three", "four"]
    assert texts(address, include=["*.jsonl", "deep/**/*.zst"], exclude=["a.*"]) == ["five"]


def test_names_and_places_are_as_of_files_here(address, tmp_path, parquet):
    for name, content in {**FILES, "p.parquet": parquet}.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(content)
    assert list(open_source(address).documents()) == list(open_source(str(tmp_path / "here")).documents())


def test_going_on_from_any_place_and_parts(address):
    source = pickle.loads(pickle.dumps(open_source(address)))
    everything = list(source.documents())
    for number, document in enumerate(everything):
        assert list(source.documents(after=document.place)) == everything[number + 1 :]
        assert source.bytes_read == source.describe()["bytes"]
    assert [document for part in source.parts() for document in part.documents()] == everything


def test_the_fingerprint_follows_a_change(address):
    before = open_source(address).describe()
    assert open_source(address).describe() == before and before["files"] == 5
    filesystem, path = fsspec.core.url_to_fs(address)
    filesystem.pipe_file(f"{path}/a.jsonl", FILES["a.jsonl"][::-1])
    if address.startswith("file"):
        os.utime(f"{path}/a.jsonl", (1, 1))
    after = open_source(address).describe()
    assert after["bytes"] == before["bytes"] and after["fingerprint"] != before["fingerprint"]


def test_mistakes_are_one_line(address, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # of a test before
    for spec, words in {
        f"{address}/none": "nothing there; check the address",
        f"{address}/*.none": "nothing there; check the address",
        "nothing://bucket": "can't be opened: Protocol not known",
        "s3://bucket/corpus": "can't be opened: Install s3fs",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            open_source(spec, key="data.validation")
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"data.validation = {spec!r}")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"needs fsspec; pip install 'meshwright\[datasets\]'"):
        open_source("memory://bucket")
    assert open_source(str(Path(__file__))).describe()["files"] == 1
