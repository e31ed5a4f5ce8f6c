"""Datasets of the Hugging Face hub, or in its format in a folder, through the library `datasets`."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.documents import Document, PlacedSource
from meshwright.data.listing import LocalFolder, below
from meshwright.data.optional import optional
from meshwright.data.rows import Rules, from_table
from meshwright.errors import UserError

# Rows that are held at a time.
BATCH_ROWS = 256


@dataclass
class Dataset:
    """The rows of one split of a dataset, as documents.

    A split with a slice, such as `train[:5%]`, is loaded whole; any other is streamed.
    """

    name: str
    """As in the run file."""
    path: str
    """The dataset's name on the hub, or a folder."""
    revision: str
    """A branch, tag or commit of the hub; empty: the newest."""
    config: str
    data_dir: str
    split: str
    rules: Rules
    key: str
    bytes_read: int = 0
    """Bytes of text of the last `documents()` so far, those passed over aside."""

    def describe(self) -> dict[str, Any]:
        about = {"config": self.config, "data_dir": self.data_dir, "split": self.split, **self.rules.changed()}
        about["revision"] = self._listing() if Path(self.path).is_dir() else self._revision()
        fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        return {"name": self.name, "fingerprint": fingerprint}

    def documents(self, after: tuple[int, int] | None = None) -> Iterator[Document]:
        self.bytes_read = 0
        passed = after[1] if after else 0
        number = passed + 1
        try:
            for rows in self._load(passed):
                names = rows.column_names  # not known yet of some kinds
                if names and not self.rules.columns(names):
                    if after is None:
                        yield Document(self.name, fault=self.rules.missing(names))
                    return
                if names:
                    rows = rows.select_columns(self.rules.roots(names))
                for table in rows.with_format("arrow").iter(BATCH_ROWS):
                    yield from self._documents_of(table, number)
                    number += table.num_rows
        except UserError:
            raise
        except Exception as error:  # the library raises what its readers and its network libraries do
            raise self._unreadable(error, f" from row {number:,} on") from None
        if number == 1 and after is None:
            yield Document(self.name, fault="empty")

    def parts(self) -> list[PlacedSource]:
        return [self]

    def _documents_of(self, table: Any, first: int) -> Iterator[Document]:
        for item in from_table(first, table, self.rules):
            self.bytes_read += _size(item.text) + sum(_size(one["content"]) for one in item.messages + item.rejected)
            name, place = f"{self.name}#{item.number}", (0, item.number)
            yield Document(name, item.text, item.fault, item.messages, place, item.rejected)

    def _load(self, passed: int) -> Iterable[Any]:
        datasets = optional("datasets", f"{self.key} = {self.name!r}")
        if _saved(self.path):
            return _saved_rows(datasets, self.path, self.split, passed)
        whole = "[" in self.split or "+" in self.split
        rows = datasets.load_dataset(**self._arguments(), split=self.split, streaming=not whole)
        if whole:
            return _selected(rows, passed, len(rows))
        return [rows.skip(passed) if passed else rows]

    def _arguments(self) -> dict[str, Any]:
        names = {"name": self.config, "data_dir": self.data_dir, "revision": self.revision}
        return {"path": self.path, **{name: value or None for name, value in names.items()}}

    def _listing(self) -> str:
        listing, folder = hashlib.sha256(), LocalFolder(Path(self.path))
        for path in sorted(path.relative_to(folder.root).as_posix() for path in below(folder.root)):
            state = folder.state(path)
            listing.update(f"{path}\0{state.size}\0{state.version}\n".encode(errors="surrogateescape"))
        return listing.hexdigest()

    def _revision(self) -> str:
        datasets = optional("datasets", f"{self.key} = {self.name!r}")
        try:
            builder = datasets.load_dataset_builder(**self._arguments())
        except Exception as error:
            raise self._unreadable(error) from None
        return f"{self.path} {builder.hash or builder.info.version}"

    def _unreadable(self, error: Exception, where: str = "") -> UserError:
        if isinstance(error.__cause__, Exception):
            error = error.__cause__
        why = (str(error).strip().splitlines() or [""])[0]
        return UserError(f"{self.key} = {self.name!r}: can't be read{where}: {type(error).__name__}: {why}")


def open_dataset(spec: str, rules: Rules, key: str) -> Dataset:
    """A dataset by its spec.

    Arguments:
        spec: `hf:<name or folder>[@revision][:config][:split]`; a config with a `/` in it is a folder of data within
            the dataset.
        rules: how rows become documents.
        key: the run file's key, for error messages.

    Raises:
        UserError: the spec has another form, or the library isn't installed.
    """
    # Colons within the brackets of a slice aren't borders.
    path, *others = re.split(r":(?![^\[]*\])", spec.removeprefix("hf:"))
    if not path or len(others) > 2:
        raise UserError(
            f"{key} = {spec!r}: must be hf:<dataset>[:config][:split], such as hf:roneneldan/TinyStories::train"
        )
    optional("datasets", f"{key} = {spec!r}")
    config, split = [*others, "", ""][:2]
    revision = ""
    if (folder := Path(path).expanduser()).is_dir():
        path = str(folder)
    else:
        path, _, revision = path.partition("@")
    data_dir = config if "/" in config else ""
    return Dataset(spec, path, revision, "" if data_dir else config, data_dir, split or "train", rules, key)


def _saved(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_rows(datasets: Any, path: str, split: str, passed: int) -> Iterator[Any]:
    found = datasets.load_from_disk(path)
    splits = found if isinstance(found, dict) else {str(found.split or "train"): found}
    sizes = {name: len(rows) for name, rows in splits.items()}
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(sizes):
        rows = splits[part.splitname]
        start, end = part.from_ or 0, len(rows) if part.to is None else part.to
        yield from _selected(rows, start + passed, end)
        passed = max(0, passed - (end - start))


def _selected(rows: Any, start: int, end: int) -> list[Any]:
    return [rows.select(range(start, end))] if start < end else []  # the library refuses to select nothing


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
