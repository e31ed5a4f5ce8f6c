"""One file to documents, by its kind: text, JSON lines, CSV, Parquet; as a stream, on from any place.

A reader gives each document with a number, in rising order, and with `after` only those of a higher number. A break of
the compression is one more document, with a fault, behind all that came before it.
"""

import csv
import json
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from meshwright.data.compressed import CHUNK_BYTES, ENDINGS, Broken, Decompressed, Readable
from meshwright.data.optional import optional
from meshwright.data.rows import Item, Rules, from_bytes, from_row, from_table, not_utf8

# Rows of Parquet that are held at a time: as many as make about so many bytes.
BATCH_BYTES, BATCH_ROWS = 2 << 20, 4096


@dataclass(frozen=True)
class Input:
    """An open file."""

    file: BinaryIO
    compression: str
    """As in `compressed.ENDINGS`, or empty."""
    size: int
    """Bytes, as it lies on the disk."""
    on_read: Callable[[int], None]
    """Called with the bytes of the file that are read, all together."""

    def stream(self) -> Readable:
        """The content, from the start."""
        counted = _Counted(self.file, self.on_read)
        return Decompressed(counted, self.compression) if self.compression else counted


class _Counted:
    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]):
        self._file, self._on_read, self._count = file, on_read, 0

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._count += len(data)
        self._on_read(self._count)
        return data


def kind_of(path: str) -> tuple[str, str]:
    """What a path's ending says: `text`, `json`, `csv`, `tsv` or `parquet`; and its compression, empty for none."""
    stem, ending = posixpath.splitext(path.lower())
    compression = ENDINGS.get(ending, "")
    if compression:
        ending = posixpath.splitext(stem)[1]
    kinds = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
    return kinds.get(ending, "text"), compression


def read(kind: str, opened: Input, rules: Rules, after: int | None) -> Iterator[Item]:
    """The documents of a file.

    Arguments:
        kind: as from `kind_of`.
        opened: the file.
        rules: how its rows and texts become documents.
        after: the number of a document, to begin with the one after it; None: from the first.
    """
    none = True
    for item in _READERS[kind](opened, rules, -1 if after is None else after):
        none = False
        yield item
    if none and after is None:
        yield Item(0, fault="empty")


def split(stream: Readable, separator: bytes, limit: int) -> Iterator[bytes | int]:
    """The parts between separators, one at a time; what follows the last one counts unless it is empty.

    Arguments:
        stream: is read in order, to its end.
        separator: one byte or more.
        limit: bytes of the largest part that is held.

    Yields:
        A part, or of a larger one its size in bytes.
    """
    held: list[bytes] = []
    size = 0  # of the part so far, `carry` aside
    carry = b""  # its end, where a separator may have begun
    while chunk := stream.read(CHUNK_BYTES):
        first, *others = (carry + chunk if carry else chunk).split(separator)
        if others:
            size += len(first)
            yield b"".join((*held, first)) if size <= limit else size
            for part in islice(others, len(others) - 1):
                yield part if len(part) <= limit else len(part)
            held, size, first = [], 0, others[-1]
        border = max(0, len(first) - len(separator) + 1)
        carry = first[border:]
        size += border
        if size <= limit:
            held.append(first[:border])
        else:
            held = []
    size += len(carry)
    if size:
        yield b"".join((*held, carry)) if size <= limit else size


def _read_text(opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    if rules.chat:
        if after < 0:
            yield Item(0, fault="not a conversation (plain text; give JSON lines, Parquet, CSV or a dataset)")
    elif rules.separator:
        yield from _read_parts(opened, rules, after)
    elif after < 0:
        yield _read_whole(opened, rules)


def _read_whole(opened: Input, rules: Rules) -> Item:
    if not opened.compression and opened.size > rules.limit:
        return Item(0, fault=rules.too_large(opened.size))
    stream = opened.stream()
    parts: list[bytes] = []
    size = 0
    try:
        while data := stream.read(CHUNK_BYTES):
            parts.append(data)
            size += len(data)
            if size > rules.limit:
                return Item(0, fault=rules.too_large(f"over {rules.limit:,}"))
    except Broken as broken:
        return Item(0, fault=f"{broken} (after {size:,} bytes)")
    return from_bytes(0, b"".join(parts), rules)


def _read_parts(opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    number = -1
    try:
        for number, part in enumerate(split(opened.stream(), rules.separator, rules.limit)):
            if number <= after:
                continue
            if isinstance(part, int):
                yield Item(number, fault=rules.too_large(part))
            else:
                yield from_bytes(number, part, rules)
    except Broken as broken:
        if number + 1 > after:
            yield Item(number + 1, fault=f"{broken} (after {number + 1} documents)")


def _read_json(opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    number = 0
    try:
        for number, line in enumerate(split(opened.stream(), b"\n", rules.limit), 1):
            if number <= after:
                continue
            if isinstance(line, int):
                yield Item(number, fault=rules.too_large(line))
            elif line and not line.isspace():
                yield _json_line(number, line, rules)
    except Broken as broken:
        if number + 1 > after:
            yield Item(number + 1, fault=f"{broken} (after {number} lines)")


def _json_line(number: int, line: bytes, rules: Rules) -> Item:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text)
    except UnicodeDecodeError as error:
        return Item(number, fault=not_utf8(error))
    except (ValueError, RecursionError) as error:
        if (nul := text.find("\0")) >= 0:
            return Item(number, fault=f"NUL byte (at {nul})")
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Item(number, fault=f"invalid JSON ({why})")
    if not isinstance(row, dict):
        return Item(number, fault="invalid JSON (a line must be an object)")
    return from_row(number, row, rules)


class _TooLarge(Exception):
    pass


class _Lines:
    """Lines for the CSV reader; refuses to go on with a row that becomes too large."""

    def __init__(self, opened: Input, limit: int):
        self._lines, self._limit = split(opened.stream(), b"\n", limit), limit
        self.number = 0
        self.size = 0
        """Bytes since it was last set to 0, at the start of a row."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.size += line if isinstance(line, int) else len(line) + 1
        if isinstance(line, int) or self.size > self._limit:
            raise _TooLarge
        return line.decode("utf-8-sig" if self.number == 1 else "utf-8", "surrogateescape") + "\n"


def _read_csv(opened: Input, rules: Rules, after: int, delimiter: str = ",") -> Iterator[Item]:
    lines = _Lines(opened, rules.limit)
    # The library's limit guards against a quote that isn't closed, which ours does; it counts for the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), rules.limit))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        number, lines.size = lines.number + 1, 0
        try:
            fields = next(rows)
            item = _csv_row(number, header, fields, rules)
        except StopIteration:
            return
        except _TooLarge:
            item = Item(number, fault=rules.too_large(lines.size))
        except csv.Error as error:
            item = Item(number, fault=f"invalid CSV ({error})")
        except Broken as broken:
            if number > after:
                yield Item(number, fault=f"{broken} (after {number - 1} lines)")
            return
        if not header and item is None:
            header = fields
        elif item and number > after:
            yield item
        if not header and item:
            return  # without a header nothing can be read


def _csv_row(number: int, header: list[str], fields: list[str], rules: Rules) -> Item | None:
    if not fields:
        return None
    if not header:
        return None if rules.columns(fields) else Item(number, fault=rules.missing(fields))
    if len(fields) != len(header):
        return Item(number, fault=f"invalid CSV (fields: {len(fields)} here, {len(header)} in the header)")
    row = dict(zip(header, fields, strict=True))
    for name in rules.roots(header):
        try:
            row[name].encode(errors="surrogateescape").decode()
        except UnicodeDecodeError as error:
            return Item(number, fault=not_utf8(error))
    return from_row(number, row, rules)


def _read_tsv(opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    return _read_csv(opened, rules, after, "\t")


def _read_parquet(opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    arrow = optional("pyarrow", "a .parquet file")
    parquet = optional("pyarrow.parquet", "a .parquet file")
    fault = ""
    try:
        with _seekable(opened) as source:
            file = parquet.ParquetFile(source, pre_buffer=False, buffer_size=CHUNK_BYTES)
            if columns := rules.columns(file.schema_arrow.names):
                yield from _read_groups(file, columns, opened, rules, after)
            else:
                fault = rules.missing(file.schema_arrow.names)
    except Broken as broken:
        fault = f"{broken} (Parquet can only be read whole)"
    except (arrow.ArrowException, OSError) as error:
        fault = _broken_parquet(error)
    if fault and after < 0:
        yield Item(0, fault=fault)


def _read_groups(file: Any, columns: list[str], opened: Input, rules: Rules, after: int) -> Iterator[Item]:
    arrow = optional("pyarrow", "a .parquet file")
    next_group = 1
    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        number, next_group = next_group, next_group + about.num_rows
        if next_group - 1 <= after:
            continue
        sizes = {
            leaf.path_in_schema: leaf.total_uncompressed_size for leaf in map(about.column, range(about.num_columns))
        }
        size = sum(size for path, size in sizes.items() if any(f"{path}.".startswith(f"{name}.") for name in columns))
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * about.num_rows // max(1, size)))
        try:
            for batch in file.iter_batches(rows, [group], columns, use_threads=False):
                passed = min(batch.num_rows, max(0, after - number + 1))
                yield from from_table(number + passed, batch.slice(passed), rules)
                number += batch.num_rows
                opened.on_read(opened.size * (number - 1) // file.metadata.num_rows)
        except (arrow.ArrowException, OSError) as error:
            fault = _broken_parquet(error)
            if number > after:
                yield Item(number, fault=fault)


def _broken_parquet(error: Exception) -> str:
    # Of the content, the library says a bare OSError; others are of the disk or the network.
    if isinstance(error, OSError) and (error.errno or type(error) is not OSError):
        raise error
    return f"broken Parquet ({(str(error).splitlines() or [''])[0]})"


@contextmanager
def _seekable(opened: Input) -> Iterator[BinaryIO]:
    if not opened.compression:
        yield opened.file
        return
    with tempfile.TemporaryFile() as whole:
        stream = opened.stream()
        while data := stream.read(CHUNK_BYTES):
            whole.write(data)
        whole.seek(0)
        yield whole


_READERS: dict[str, Callable[[Input, Rules, int], Iterator[Item]]] = {
    "text": _read_text,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_tsv,
    "parquet": _read_parquet,
}
