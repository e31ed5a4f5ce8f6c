"""Where text comes from: files here or at an address, Python's own source, a dataset; as a stream of documents."""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config_data import SourceKeys
from meshwright.data.documents import Document, PlacedSource, Source
from meshwright.data.hub import open_dataset
from meshwright.data.listing import Folder, Listing, below, list_local, list_remote, local_listing, matcher
from meshwright.data.optional import optional
from meshwright.data.readers import Input, kind_of, read
from meshwright.data.rows import Rules
from meshwright.data.store import is_store
from meshwright.errors import UserError

__all__ = ["Document", "Files", "PlacedSource", "Source", "open_source"]

# Tests of the library, and what others installed into it.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class Files:
    """The documents of a list of files; each is read by its kind, as `readers.kind_of` says.

    What can't be used comes out as a document with a fault.
    """

    name: str
    folder: Folder
    paths: tuple[str, ...]
    """POSIX paths below the folder, in the order of reading."""
    rules: Rules = field(default_factory=Rules)
    first: int = 0
    """The number of the first file."""
    bytes_read: int = 0

    def describe(self) -> dict[str, Any]:
        listing = hashlib.sha256()
        total = 0
        for path in self.paths:
            state, kind = self.folder.state(path), kind_of(path)
            note = "" if kind == ("text", "") else f"\0{' '.join(kind)}"
            listing.update(f"{path}\0{state.size}\0{state.version}{note}\n".encode(errors="surrogateescape"))
            total += state.size
        if changed := self.rules.changed():
            listing.update(json.dumps(changed, sort_keys=True).encode())
        return {"name": self.name, "fingerprint": listing.hexdigest(), "files": len(self.paths), "bytes": total}

    def documents(self, after: tuple[int, int] | None = None) -> Iterator[Document]:
        self.bytes_read = 0
        after_file, after_number = after or (-1, -1)
        for file, path in enumerate(self.paths, self.first):
            try:
                before, size = self.bytes_read, self.folder.state(path).size
                if file >= after_file:
                    yield from self._read(file, path, size, after_number if file == after_file else None)
                self.bytes_read = before + size
            except OSError as error:
                where = self.folder.where(path)
                raise UserError(f"{where}: can't be read: {error.strerror or error}") from None

    def parts(self) -> list[PlacedSource]:
        return [
            Files(f"{self.name} ({path})", self.folder, (path,), self.rules, file)
            for file, path in enumerate(self.paths, self.first)
        ]

    def _read(self, file: int, path: str, size: int, after: int | None) -> Iterator[Document]:
        kind, compression = kind_of(path)
        if kind == "text" and not self.rules.separator and after is not None:
            return  # its only document was read
        before = self.bytes_read

        def count(done: int) -> None:
            self.bytes_read = before + done

        with self.folder.open(path) as opened:
            for item in read(kind, Input(opened, compression, size, count), self.rules, after):
                # By itself a file's name says it all, where the file is one document, and where it can't be read.
                alone = item.number == 0 and not (kind == "text" and self.rules.separator)
                name = path if alone else f"{path}#{item.number}"
                yield Document(name, item.text, item.fault, item.messages, (file, item.number), item.rejected)


def open_source(spec: str, keys: Any = None, key: str = "data.train", *, pairs: bool = False) -> PlacedSource:
    """Open what a run file names as a source.

    Arguments:
        spec: `python-stdlib`; a file, a folder (all files below it, hidden ones aside), or a glob (`**` recurses), here
            or at an address such as `s3://bucket/texts`; or `hf:<dataset>[:config][:split]`.
        keys: how it is read: anything with the attributes of `SourceKeys`; None: their defaults.
        key: the run file's key, for error messages.
        pairs: whether rows are pairs of answers.

    Raises:
        UserError: there is no such file, nothing matches, or a library is missing.
    """
    keys = keys or SourceKeys()
    rules = Rules.of(keys, pairs=pairs)
    if spec.startswith("hf:") and "://" not in spec:
        return open_dataset(spec, rules, key)
    kept = _kept(keys)
    if "://" in spec:
        folder, paths = list_remote(spec, key, kept)
    elif spec == "python-stdlib":
        folder, paths = _python_stdlib(kept)
    elif is_store(spec):
        raise UserError(f"{key} = {spec!r}: is a prepared store; name the text that it was made from")
    else:
        folder, paths = list_local(spec, key, kept)
    if not paths:
        raise UserError(
            f"{key} = {spec!r}: data.include = {keys.include} and data.exclude = {keys.exclude} leave no file; they "
            "are globs on the paths below it"
        )
    for kind, compression in {kind_of(path) for path in paths}:
        if kind == "parquet":
            optional("pyarrow", f"{key} = {spec!r}")
        if compression == "zstd":
            optional("zstandard", f"{key} = {spec!r}")
    return Files(spec, folder, paths, rules)


def _kept(keys: Any) -> Callable[[str], bool]:
    included, excluded = matcher(keys.include), matcher(keys.exclude)
    return lambda path: (not keys.include or included(path)) and not (keys.exclude and excluded(path))


def _python_stdlib(kept: Callable[[str], bool]) -> Listing:
    root = Path(sysconfig.get_paths()["stdlib"])
    return local_listing([path for path in below(root, STDLIB_SKIPPED) if path.suffix == ".py"], root, kept)
