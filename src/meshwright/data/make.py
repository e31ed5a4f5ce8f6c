"""One store, made: its documents encoded, sorted into splits and written, in steps that a crash can't undo."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.config_data import DataSection
from meshwright.data.chat import make_template
from meshwright.data.documents import Source
from meshwright.data.duplicates import Seen
from meshwright.data.encode import EncodedBlock, LeftOut, Mark, Progress, blocks, id_type, is_held_out
from meshwright.data.partial import SEEN, Partial
from meshwright.data.store import SPLITS
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.workers import Task, encode_in_order
from meshwright.data.writer import Damaged, SplitWriter, write_manifest
from meshwright.errors import UserError

# Bytes of text after which the work so far is made safe, whole shards aside.
COMMIT_BYTES = 128 << 20

Role = Literal["train", "validation", "apart"]

Encode = Callable[[Source, Mark | None, Task, Tokenizer, int], Generator[tuple[Mark, EncodedBlock], None, None]]
"""A way to encode: source, place to go on from, what to do, the tokenizer, and how many processes (0: one a core).

Gives, for each block of documents in the source's order, the place after it and what became of it. Where blocks end
doesn't matter to what is written.
"""


@dataclass(frozen=True)
class Recipe:
    """What a store is made from.

    Arguments:
        name: what progress calls it; empty where it is the only one.
        key: the run file's key and value, for error messages.
        path: where it goes.
        train: the corpus.
        validation: the share of its documents that is held out, or a corpus of its own.
        apart: a corpus whose documents are left out as duplicates: the held-out one of another store.
        chat: as `data.chat`; the store then has weights.
        made_from: what the manifest says of all that.
    """

    name: str
    key: str
    path: Path
    train: Source
    validation: Source | float
    apart: Source | None
    chat: str
    made_from: dict[str, Any]

    def passes(self) -> list[tuple[Role, Source, int | None]]:
        """What is read, in order, each with its bytes on disk where they are known.

        What is held out comes first: of a document that stands there and in the corpus too, the one in the corpus is
        the duplicate, so that what is held out doesn't depend on what there is to learn.
        """
        found: list[tuple[Role, Source, int | None]] = [("train", self.train, self.made_from["source"].get("bytes"))]
        if self.apart is not None:
            found.insert(0, ("apart", self.apart, self.made_from["apart_from"].get("bytes")))
        if not isinstance(self.validation, float):
            found.insert(0, ("validation", self.validation, self.made_from["validation"].get("bytes")))
        return found


def encode_here(
    source: Source, after: Mark | None, task: Task, tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Mark, EncodedBlock], None, None]:
    """Encode in this process and others of this machine; see `encode_in_order`."""
    return encode_in_order(blocks(source, after), task, tokenizer, processes)


def make_store(
    recipe: Recipe,
    partial: Partial,
    tokenizer: Tokenizer,
    data: DataSection,
    progress: Progress,
    encode: Encode = encode_here,
) -> None:
    """Make a store whole in its partial folder, going on from what was committed there.

    Arguments:
        recipe: what it is made from.
        partial: where; the tokenizer is saved there already.
        tokenizer: what encodes.
        data: the run's, for `packing`, `normalize`, `deduplicate`, `on_bad` and `processes`.
        progress: called once a block, from this thread.
        encode: how documents become tokens.

    Raises:
        Damaged: what was committed isn't there any more; the folder must be reset.
        UserError: no training documents; under `on_bad = "stop"`, a document that can't be used.
    """
    making = _Making(recipe, partial, tokenizer, data, progress)
    try:
        making.read(encode)
        making.finish()
    finally:
        making.close()


class _Making:
    def __init__(
        self, recipe: Recipe, partial: Partial, tokenizer: Tokenizer, data: DataSection, progress: Progress
    ) -> None:
        state = partial.state if "splits" in partial.state else {}
        self.recipe, self.partial, self.tokenizer, self.data, self.progress = recipe, partial, tokenizer, data, progress
        template = make_template(recipe.chat, tokenizer) if recipe.chat else None
        self.task = Task(str(partial.folder / "tokenizer"), template, data.normalize, data.packing == "pairs")
        self.share = recipe.validation if isinstance(recipe.validation, float) else 0.0
        self.commits: int = state.get("commits", 0)
        self.uncommitted = 0
        self.number: int = state.get("pass", 0)
        self.mark = _mark(*state["mark"]) if state.get("mark") else None
        self.text_bytes: int = state.get("text_bytes", 0)
        self.duplicates: int = state.get("duplicates", 0)
        self.left_out = LeftOut(stop=data.on_bad == "stop", **state.get("left_out", {}))
        splits = state.get("splits", {})
        dtype, weighted = id_type(tokenizer), bool(recipe.chat)
        self.writers = {name: SplitWriter(partial.folder, name, dtype, weighted, splits.get(name)) for name in SPLITS}
        self.seen = None
        if data.deduplicate:
            if self.commits and not (partial.folder / SEEN).is_file():
                raise Damaged(partial.folder / SEEN)
            self.seen = Seen(partial.folder / SEEN, self.commits)

    def read(self, encode: Encode) -> None:
        """All documents into the writers."""
        passes = self.recipe.passes()
        sizes = [size for _, _, size in passes]
        total = sum(size or 0 for size in sizes) if None not in sizes else None
        stage = f"encode {self.recipe.name}".rstrip()
        for number, (role, source, _) in enumerate(passes[self.number :], start=self.number):
            if number > self.number:
                self.number, self.mark, self.text_bytes = number, None, 0
            before = sum(size or 0 for size in sizes[:number])
            encoded = encode(source, self.mark, self.task, self.tokenizer, self.data.processes)
            with closing(encoded) as results:
                for mark, block in results:
                    shards = sum(writer.shard_count for writer in self.writers.values())
                    self._take(role, block)
                    size = int(block.sizes.sum())
                    self.mark, self.text_bytes = mark, self.text_bytes + size
                    self.uncommitted += size
                    whole_shard = sum(writer.shard_count for writer in self.writers.values()) > shards
                    if whole_shard or self.uncommitted >= COMMIT_BYTES:
                        self._commit()
                    done = before + (self.text_bytes if mark.read is None else mark.read)
                    self.progress(stage, done, total, *self._written())

    def finish(self) -> None:
        """The manifest, when there is something to learn from."""
        splits = {name: writer.finish() for name, writer in self.writers.items()}
        self._check(*(splits[name]["documents"] for name in SPLITS))
        left_out = self.left_out.to_json()
        about = {"made_from": self.recipe.made_from, "left_out": left_out, "duplicates": self.duplicates}
        about |= {"pairs": True} if self.task.pairs else {}
        write_manifest(self.partial.folder, splits, self.tokenizer, id_type(self.tokenizer), about)

    def close(self) -> None:
        """Close all files."""
        for writer in self.writers.values():
            writer.close()
        if self.seen is not None:
            self.seen.close()

    def _take(self, role: Role, block: EncodedBlock) -> None:
        for name, fault in block.faults if role != "apart" else ():
            self.left_out.add(name, fault)
        new = np.ones(len(block.digests), bool)
        if self.seen is not None:
            new = np.array([self.seen.add(digest) for digest in block.digests], bool)
            if role != "apart":
                self.duplicates += int((~new).sum())
        if role == "apart":
            return
        held_out = np.array([role == "validation" or is_held_out(digest, self.share) for digest in block.digests], bool)
        for name, chosen in zip(SPLITS, (new & ~held_out, new & held_out), strict=True):
            if chosen.any():
                self._write(self.writers[name], block, chosen)

    def _write(self, writer: SplitWriter, block: EncodedBlock, chosen: np.ndarray) -> None:
        if chosen.all():
            writer.append(block.tokens, block.ends, int(block.sizes.sum()), block.weights)
            return
        lengths = np.diff(block.ends, prepend=0)
        tokens = np.repeat(chosen, lengths)
        weights = None if block.weights is None else block.weights[tokens]
        writer.append(block.tokens[tokens], np.cumsum(lengths[chosen]), int(block.sizes[chosen].sum()), weights)

    def _commit(self) -> None:
        splits = {name: writer.commit() for name, writer in self.writers.items()}
        if self.seen is not None:
            self.seen.commit()
        self.commits += 1
        self.uncommitted = 0
        self.partial.commit(
            {
                "tokenizer": self.tokenizer.fingerprint,
                "commits": self.commits,
                "pass": self.number,
                "mark": self.mark,
                "text_bytes": self.text_bytes,
                "duplicates": self.duplicates,
                "left_out": self.left_out.to_json(),
                "splits": splits,
            }
        )

    def _written(self) -> tuple[int, int]:
        writers = self.writers.values()
        return sum(writer.tokens for writer in writers), sum(writer.documents for writer in writers)

    def _check(self, train: int, held_out: int) -> None:
        share = self.recipe.validation
        why = ""
        if not train:
            if self.left_out.documents:
                why = f" ({self.left_out.documents} left out, the first {self.left_out.examples[0]})"
            elif held_out and isinstance(share, float):
                why = f" (data.validation = {self.data.validation} holds out all {held_out})"
            elif self.duplicates:
                why = " (all are duplicates of what is held out)"
            fault = f"{self.recipe.key}: gives no training documents{why}; give it more text"
        elif share and not held_out and not self.recipe.name:
            fault = (
                f"data.validation = {self.data.validation!r}: holds out none of the {train:,} documents; set "
                "data.separator if a file holds several, raise the share, give a file of its own, or set it to 0"
            )
        else:
            return
        self.partial.reset()  # going on from there would end the same way
        raise UserError(fault)


def _mark(documents: int, place: list[int], read: int | None) -> Mark:
    return Mark(documents, (place[0], place[1]), read)
