import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.config_data import SourceKeys
from meshwright.data import readers
from meshwright.data.documents import Document, PlacedSource
from meshwright.data.sources import open_source
from meshwright.errors import UserError

TEXTS = [f"{number}. " + 'ein Wörtchen, "zwei"\n' * (number % 5 + 1) for number in range(40)]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"n": n, key: text}) + "\n" for n, text in enumerate(texts)).encode()


def write(path: Path, texts: list[str]) -> None:
    """Texts in the form that the path's ending says, three to a row group of Parquet."""
    kind, compression = path.name.split(".")[1], path.suffix if path.suffix in COMPRESS else ""
    if kind == "parquet":
        table = pyarrow.table({"n": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        content = path.read_bytes()
    elif kind in ("csv", "tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            writer.writerows([["n", "text"], *enumerate(texts)])
        content = path.read_bytes()
    elif kind == "txt":
        content = "<|end|>".join(texts).encode()
    else:
        content = json_lines(texts)
    path.write_bytes(COMPRESS[compression](content))


def read(path: Path, **keys) -> list[Document]:
    return list(open_source(str(path), SourceKeys(**keys)).documents())


def faults(path: Path, **keys) -> list[str]:
    return [f"{document.name}: {document.fault}" for document in read(path, **keys) if document.fault]


def check_places(source: PlacedSource) -> list[Document]:
    """Going on after any document gives the rest, and the parts give the whole."""
    everything = list(source.documents())
    places = [document.place for document in everything]
    assert places == sorted(set(places))
    for number, document in enumerate(everything):
        assert list(source.documents(after=document.place)) == everything[number + 1 :]
        assert source.bytes_read == source.describe()["bytes"]
    assert [document for part in source.parts() for document in part.documents()] == everything
    return everything


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "txt"])
def test_every_kind_gives_its_texts_from_any_place_on(tmp_path, kind, compression):
    texts = TEXTS[:8]
    for name, part in {"a": texts[:5], "b": [], "c": texts[5:]}.items():
        write(tmp_path / f"{name}.{kind}{compression}", part)
    source = open_source(str(tmp_path), SourceKeys(separator="<|end|>"))
    documents = check_places(source)
    assert [document.text for document in documents if not document.fault] == texts
    assert [(d.fault, d.place) for d in documents if d.fault] == [("empty", (1, 0))]
    assert len(source.parts()) == source.describe()["files"] == 3


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_text_file_is_one_document(tmp_path, compression):
    for name, text in {"a": "one\n", "b": "", "c": "three"}.items():
        (tmp_path / f"{name}.rs{compression}").write_bytes(COMPRESS[compression](text.encode()))
    documents = check_places(open_source(str(tmp_path)))
    assert [(d.text, d.fault) for d in documents] == [("one\n", ""), ("", "empty"), ("three", "")]
    assert documents[0].name == f"a.rs{compression}"


def test_names_give_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}', encoding="utf-8")
    (tmp_path / "b.csv").write_text('text\n"x\ny"\n\nz\n', encoding="utf-8")
    assert [d.name for d in read(tmp_path)] == ["a.jsonl#1", "a.jsonl#3", "b.csv#2", "b.csv#5"]


def test_a_csv_field_longer_than_the_library_allows_by_itself(tmp_path):
    text = 'a "quoted" word, ' * 20_000
    write(tmp_path / "a.csv", [text, "b"])
    assert [document.text for document in read(tmp_path)] == [text, "b"]


def test_files_before_are_never_opened(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.jsonl", TEXTS[:3])
    source = open_source(str(tmp_path))
    (tmp_path / "a.jsonl").chmod(0)
    original, opened = type(source.folder).open, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source.folder), "open", lambda self, path: (opened.append(path), original(self, path))[1])
        assert len(list(source.documents(after=(1, 2)))) == 4
    assert opened == ["b.jsonl", "c.jsonl"]


def test_a_field_by_name_and_by_path(tmp_path):
    row = {"content": "a", "meta": {"text": "b", "deep": {"er": "c"}}, "x.y": "d"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
    for field, text in {"content": "a", "meta.text": "b", "meta.deep.er": "c", "x.y": "d"}.items():
        assert [document.text for document in read(tmp_path, field=field)] == [text, text]
    assert faults(tmp_path, field="meta.none") == [
        "a.jsonl#1: missing field (meta.none)",
        "b.parquet#1: missing field (meta.none)",
    ]


def test_bad_json_lines_are_named_and_the_others_stay(tmp_path):
    good = b'{"text": "good"}'
    bad = {
        b'{"text": "caf\xe9"}': "not UTF-8 (byte 13)",
        b'{"content": "x"}': "missing field (text)",
        b'{"text": null}': "missing field (text is null)",
        b'{"text": 3}': "field isn't text (text is a number)",
        b'{"text": ["x"]}': "field isn't text (text is a list)",
        b'{"text": "x"': "invalid JSON (Expecting ',' delimiter, column 13)",
        b'["text"]': "invalid JSON (a line must be an object)",
        b'{"text": ' + b"[" * 100_000: "invalid JSON (maximum recursion depth exceeded",
        b'{"text": ' + b"9" * 5000 + b"}": "invalid JSON (Exceeds the limit",
        b'{"text": "x\0y"}': "NUL byte (at 11)",
        b'{"text": "x\\u0000y"}': "NUL byte (at 1)",
        b'{"text": "x\\ud83d"}': "lone surrogate (half a character, at 1)",
        b'{"text": ""}': "empty",
    }
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(line for one in bad for line in (good, one)) + b"\n" + good)
    documents = check_places(open_source(str(tmp_path)))
    assert [document.text for document in documents if not document.fault] == ["good"] * (len(bad) + 1)
    found = [document for document in documents if document.fault]
    for number, (document, fault) in enumerate(zip(found, bad.values(), strict=True)):
        assert document.fault.startswith(fault) and document.name == f"a.jsonl#{2 * number + 2}"


def test_bad_csv_rows_are_named_and_the_others_stay(tmp_path):
    rows = [
        b"\xef\xbb\xbfn,text",
        b"1,good",
        b"2,caf\xe9",
        b"3",
        b'4,"a" b',
        b"5,a\0b",
        b"6,",
        b"7,gr\xc3\xbcn",
        b'8,"open',
    ]
    (tmp_path / "a.csv").write_bytes(b"\n".join(rows))
    (tmp_path / "b.csv").write_bytes(b"n,content\n1,x\n2,y\n")
    documents = check_places(open_source(str(tmp_path)))
    assert [document.text for document in documents if not document.fault] == ["good", "grün"]
    assert faults(tmp_path) == [
        "a.csv#3: not UTF-8 (byte 3)",
        "a.csv#4: invalid CSV (fields: 1 here, 2 in the header)",
        "a.csv#5: invalid CSV (',' expected after '\"')",
        "a.csv#6: NUL byte (at 1)",
        "a.csv#7: empty",
        "a.csv#9: invalid CSV (unexpected end of data)",
        "b.csv#1: missing field (text; there are n, content)",
    ]


def test_bad_parquet_is_named_and_the_others_stay(tmp_path):
    invalid = pyarrow.array([b"good", b"caf\xe9", b"a\0b", None, b""]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([b"gr\xc3\xbcn", b"\xff"])}), tmp_path / "c.parquet"
    )
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-10])
    assert [document.text for document in check_places(open_source(str(tmp_path))) if not document.fault] == [
        "good",
        "grün",
    ]
    *found, last = faults(tmp_path)
    assert found == [
        "a.parquet#2: not UTF-8 (byte 3)",
        "a.parquet#3: NUL byte (at 1)",
        "a.parquet#4: missing field (text is null)",
        "a.parquet#5: empty",
        "b.parquet: missing field (text; there are n)",
        "c.parquet#2: not UTF-8 (byte 0)",
    ]
    assert last.startswith("d.parquet: broken Parquet (")


def test_a_broken_row_group_leaves_the_others(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:9]}), path, row_group_size=3, use_dictionary=False)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    documents = check_places(open_source(str(path)))
    assert [document.text for document in documents] == [*TEXTS[:3], "", *TEXTS[6:9]]
    assert documents[3].fault.startswith("broken Parquet (") and documents[3].name == "a.parquet#4"


def test_parquet_with_a_broken_footer_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:3]}), path)
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[-8:-4], "little")
    content[-8 - size : -8] = b"\xff" * size
    path.write_bytes(content)
    (document,) = check_places(open_source(str(path)))
    assert document.fault.startswith("broken Parquet (") and document.name == "a.parquet"


@pytest.mark.parametrize("reads", [1, 6])
def test_a_network_that_fails_is_no_broken_parquet(tmp_path, monkeypatch, reads):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:9]}), path, row_group_size=1)

    class Failing(io.BytesIO):
        left = reads

        def read(self, *size):
            self.left -= 1
            if self.left < 0:
                raise TimeoutError("no answer")  # as fsspec does: an OSError without a number
            return super().read(*size)

    monkeypatch.setattr("meshwright.data.listing.LocalFolder.open", lambda *of: Failing(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.parquet: can't be read: no answer"):
        list(open_source(str(path)).documents())


@pytest.mark.parametrize("compression", [".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_all_before_a_break_is_kept(tmp_path, kind, compression):
    words = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
    texts = [f"{number} {number * 7919 % 1009}" * 50 for number in range(4000)]
    path = tmp_path / f"a.{kind}{compression}"
    write(path, texts)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    write(tmp_path / f"b.{kind}{compression}", texts[:2])
    source = open_source(str(tmp_path), SourceKeys(separator="<|end|>"))
    *kept, broken, first, second = source.documents()
    assert [document.text for document in kept] == texts[: len(kept)] and len(kept) > 100
    assert broken.fault.startswith(f"truncated {words[compression]} (after ")
    assert [first.text, second.text] == texts[:2]
    assert list(source.documents(after=kept[-1].place)) == [broken, first, second]
    assert list(source.documents(after=broken.place)) == [first, second]


@pytest.mark.parametrize("compression", [".gz", ".zst", ".bz2", ".xz"])
def test_half_a_text_file_and_what_is_not_compressed_at_all(tmp_path, compression):
    whole = COMPRESS[compression]("".join(str(n * 7919 % 1009) for n in range(30_000)).encode())
    (tmp_path / f"a.txt{compression}").write_bytes(whole[: len(whole) // 2])
    (tmp_path / f"b.txt{compression}").write_bytes(b"plain text, and some more of it")
    (tmp_path / f"c.txt{compression}").write_bytes(COMPRESS[compression](b"one, ") + COMPRESS[compression](b"two"))
    half, plain, members = read(tmp_path)
    assert half.fault.startswith("truncated ") and not half.text
    assert plain.fault.startswith("broken ") and members.text == "one, two"


def test_documents_and_lines_that_are_too_large(tmp_path):
    large = "x" * 1200
    write(tmp_path / "a.jsonl", ["one", large, "three"])
    write(tmp_path / "b.csv", ["one", large, "three"])
    write(tmp_path / "c.parquet", ["one", large, "three"])
    write(tmp_path / "d.txt", ["one", large, "three"])
    (tmp_path / "e.csv").write_text('n,text\n1,"' + "many lines\n" * 200 + '"\n2,three\n', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", 100)
        found = faults(tmp_path, max_document_mb=0.001, separator="<|end|>")
        documents = check_places(open_source(str(tmp_path), SourceKeys(max_document_mb=0.001, separator="<|end|>")))
    assert found[:4] == [
        "a.jsonl#2: too large (1,220 bytes; data.max_document_mb = 0.001)",
        "b.csv#3: too large (1,203 bytes; data.max_document_mb = 0.001)",
        "c.parquet#2: too large (1,200 bytes; data.max_document_mb = 0.001)",
        "d.txt#1: too large (1,200 bytes; data.max_document_mb = 0.001)",
    ]
    assert found[4].startswith("e.csv#2: too large (1,0")
    assert [document.text for document in documents if not document.fault][:8] == ["one", "three"] * 4
    assert faults(tmp_path / "d.txt", max_document_mb=0.001) == [
        "d.txt: too large (1,222 bytes; data.max_document_mb = 0.001)"
    ]


PEAK = """
import sys
import pyarrow.parquet, zstandard
from meshwright.config_data import SourceKeys
from meshwright.data.sources import open_source
from meshwright.errors import UserError

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10

keys = SourceKeys(separator="<|end|>", max_document_mb=1.0)
for document in open_source(sys.argv[1], keys).documents():
    pass
before = peak()
faults = [document.fault for document in open_source(sys.argv[2], keys).documents() if document.fault]
print(peak() - before, faults)
"""


def growth(small: Path, large: Path) -> tuple[int, str]:
    """Megabytes by which reading a large file raises the peak after a small one, and its faults."""
    result = subprocess.run([sys.executable, "-c", PEAK, small, large], capture_output=True, text=True, check=True)
    megabytes, found = result.stdout.split(" ", 1)
    return int(megabytes), found.strip()


def test_a_line_of_100_mb_is_never_held(tmp_path):
    line = json.dumps({"text": "x" * 100_000_000}).encode()
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst"):
        small, large = tmp_path / f"small.{ending}", tmp_path / f"large.{ending}"
        write(small, TEXTS)
        compress = {"jsonl": bytes, "jsonl.gz": lambda data: gzip.compress(data, 1), "jsonl.zst": COMPRESS[".zst"]}
        large.write_bytes(compress[ending](json_lines(TEXTS) + line + b"\n" + json_lines(TEXTS)))
        megabytes, found = growth(small, large)
        assert found == "['too large (100,000,012 bytes; data.max_document_mb = 1)']" and megabytes < 40


@pytest.mark.parametrize("kind", ["jsonl", "csv.gz", "txt.zst", "parquet"])
def test_memory_stays_flat(tmp_path, kind):
    text = TEXTS[4] * 100
    small, large = tmp_path / f"small.{kind}", tmp_path / f"large.{kind}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPRESS, ".gz", lambda data: gzip.compress(data, 1))
        for path, count in ((small, 1000), (large, 3500)):
            write(path, [f"{number} {text}" for number in range(count)])
    megabytes, found = growth(small, large)
    assert found == "[]" and megabytes < 25
