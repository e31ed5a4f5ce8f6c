"""Stores written by hand."""

from pathlib import Path

import numpy as np

from meshwright.data.store import SPLITS, Store
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.data.writer import SplitWriter, write_manifest


def write_store(folder: Path, train: list[list[int]], validation: list[list[int]] | None = None) -> Store:
    """A store of byte ids, given as documents."""
    folder.mkdir(parents=True)
    tokenizer = ByteTokenizer()
    entries = {}
    for name, documents in zip(SPLITS, (train, validation or []), strict=True):
        writer = SplitWriter(folder, name, np.dtype(np.uint16))
        for document in documents:
            writer.append(np.array([*document, tokenizer.end_of_text]), [len(document) + 1], len(document))
        entries[name] = writer.finish()
    write_manifest(folder, entries, tokenizer, np.dtype(np.uint16), {"made_from": {"tokenizer": {}}})
    return Store.open(folder)
