"""What the tests of prepare share."""

import hashlib
from pathlib import Path

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.documents import Document
from meshwright.data.prepare import prepare
from meshwright.data.store import Store


class Documents:
    """A researcher's own source."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def describe(self):
        return {"name": "mine", "fingerprint": hashlib.sha256(repr(self.texts).encode()).hexdigest()}

    def documents(self):
        return iter([Document(f"mine-{i}", text) for i, text in enumerate(self.texts)])


def prepare_one(run: Run, **arguments) -> Store:
    """The store of a run that has one source."""
    (store,) = prepare(run, **arguments).stores
    return store


def documents(store: Store | Corpus, split: str) -> list[str]:
    """The documents of a split, as text."""
    tokens = store.split(split)
    return [store.tokenizer().decode(tokens.document(i)) for i in range(tokens.document_count)]


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
