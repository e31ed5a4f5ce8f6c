"""Stores written by hand."""

from pathlib import Path

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.data.store import SPLITS, Store
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.data.writer import SplitWriter, save_tokenizer, write_manifest


def write_store(
    folder: Path,
    train: list[list[int]],
    validation: list[list[int]] | None = None,
    weights: list[list[int]] | None = None,
) -> Store:
    """A store of byte ids, given as documents; `weights` are those of the training documents' tokens."""
    folder.mkdir(parents=True)
    tokenizer = ByteTokenizer()
    entries = {}
    for name, documents in zip(SPLITS, (train, validation or []), strict=True):
        weighted = name == "train" and weights is not None
        writer = SplitWriter(folder, name, np.dtype(np.uint16), weighted)
        for number, document in enumerate(documents):
            tokens = np.array([*document, tokenizer.end_of_text])
            counted = np.array([*weights[number], 1]) if weighted else None
            writer.append(tokens, [len(document) + 1], len(document), counted)
        entries[name] = writer.finish()
    save_tokenizer(folder, tokenizer)
    write_manifest(folder, entries, tokenizer, np.dtype(np.uint16), {"made_from": {"tokenizer": {}}})
    return Store.open(folder)


def corpus_of(*stores: Store, weights: list[list[tuple[int, float]]] | None = None) -> Corpus:
    """A corpus of stores, all of the same weight unless `weights` says otherwise."""
    names = [store.path.name for store in stores]
    return Corpus(list(stores), names, weights or [[(0, 1.0)] for _ in stores])
