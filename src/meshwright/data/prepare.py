"""From a run's text to its token stores: opened where they are there already, else made."""

from collections.abc import Callable
from typing import Any

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.documents import Source
from meshwright.data.encode import Progress
from meshwright.data.make import Encode, Recipe, encode_here, make_store
from meshwright.data.packing import prepare_packing
from meshwright.data.pairs import check_pairs, pairs_left_out
from meshwright.data.partial import Partial, Taken, claim, identity, is_free, tidy
from meshwright.data.recipes import Plan, plan_stores
from meshwright.data.store import Store
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from meshwright.data.training_text import training_texts
from meshwright.data.writer import Damaged, save_tokenizer
from meshwright.errors import UserError


def prepare(
    run: Run,
    *,
    source: Source | None = None,
    on_progress: Progress | None = None,
    on_note: Callable[[str], None] | None = None,
    encode: Encode = encode_here,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """The token stores of a run, one a source.

    A source may be a store, or the only one a nanoGPT `.bin`: these are opened where they lie. The store of another is
    at `stores/<key>`, where the key covers what it is made from: the source's listing and how it is read,
    `data.validation`, `data.normalize`, `data.deduplicate` and the tokenizer. With `data.store`, it is there; of
    several sources, in folders in there. A store that is there is opened; one that isn't is made in a folder beside
    (`….partial`), which is renamed into place when whole. A call that is cut short leaves that folder, and the next
    one goes on from there, to the same bytes; one that finds another process at work there waits for it.

    `bpe` is trained on the training documents of all sources together; where a source is a store, the others are
    encoded by its tokenizer. A share for validation is held out of each source, by content, so that a duplicate is
    never on both sides. A validation source of its own goes with the first store that is made here; under
    `data.deduplicate`, what stands in it is no training document of any source, and a document that comes twice
    within a source is kept once.

    Arguments:
        run: the run.
        source: documents from Python, in place of `data.train`.
        on_progress: called as `Progress` says.
        on_note: called with a line to show: that another process is waited for, and what was left out, or doesn't
            fit a row.
        encode: how documents become tokens; the stores are the same, however it is done.
        tokenizer: what encodes, in place of `tokenizer.kind`.

    Raises:
        UserError: no text, no such file, a tokenizer that can't be had, a split without documents, a document that
            can't be used under `data.on_bad = "stop"`, or a store at the run's place that was made from something else.
    """
    plan = plan_stores(run, source, tokenizer)
    preparing = _Preparing(run, plan, on_progress or _silent, on_note or _unheard, encode)
    corpus = Corpus(preparing.stores(), plan.names, plan.weights)
    _check(run, plan, corpus)
    prepare_packing(corpus, run)
    if on_note and (left_out := pairs_left_out(corpus, run)):
        on_note(left_out)
    return corpus


class _Preparing:
    def __init__(self, run: Run, plan: Plan, progress: Progress, note: Callable[[str], None], encode: Encode) -> None:
        self.run, self.plan, self.progress, self.note, self.encode = run, plan, progress, note, encode
        self.tokenizer = plan.tokenizer

    def stores(self) -> list[Store]:
        """All stores, made where they aren't there."""
        stores = []
        for item in self.plan.items:
            stores.append(item if isinstance(item, Store) else self._store(item))
            if self.tokenizer is None and len(stores) < len(self.plan.items):
                self.tokenizer = stores[0].tokenizer()
        return stores

    def _store(self, recipe: Recipe) -> Store:
        made = False
        if is_free(recipe.path):
            try:
                with claim(recipe.path, recipe.made_from, lambda: self._waiting(recipe)) as partial:
                    if partial is not None and not partial.complete:
                        self._make(recipe, partial)
                        made = True
            except Taken:
                pass  # another process put it there, without our lock
        store = _open_own(recipe)
        if self.run.data.on_bad == "stop" and store.manifest["left_out"]["documents"]:
            raise UserError(
                f"data.on_bad = 'stop': the store at {recipe.path} was made with \"skip\", and left out "
                f"{store.manifest['left_out']['examples'][0]}, among others; remove the store to have it made anew, or "
                'set data.on_bad = "skip"'
            )
        if made and (left_out := _left_out(recipe, store)):
            self.note(left_out)
        return store

    def _waiting(self, recipe: Recipe) -> None:
        self.note(f"another process is making {recipe.path}; waiting for it")

    def _make(self, recipe: Recipe, partial: Partial) -> None:
        data = self.run.data
        try:
            make_store(recipe, partial, self._saved_tokenizer(partial), data, self.progress, self.encode)
        except Damaged:
            partial.reset()
            make_store(recipe, partial, self._saved_tokenizer(partial), data, self.progress, self.encode)

    def _saved_tokenizer(self, partial: Partial) -> Tokenizer:
        if committed := partial.state.get("tokenizer"):
            try:
                tokenizer = load_tokenizer(partial.folder / "tokenizer")
            except UserError:
                raise Damaged(partial.folder / "tokenizer") from None
            if tokenizer.fingerprint != committed:
                raise Damaged(partial.folder / "tokenizer")
            return tokenizer
        partial.reset()
        if self.tokenizer is not None:
            save_tokenizer(partial.folder, self.tokenizer)
            return self.tokenizer
        tokenizer = self._trained()
        save_tokenizer(partial.folder, tokenizer)
        partial.commit({"tokenizer": tokenizer.fingerprint})
        return tokenizer

    def _trained(self) -> Tokenizer:
        data = self.run.data
        recipes = [item for item in self.plan.items if isinstance(item, Recipe)]
        sources = [(recipe.train, recipe.made_from["source"].get("bytes")) for recipe in recipes]
        share = data.validation if isinstance(data.validation, float) else 0.0
        texts = training_texts(sources, share, data.normalize, data.on_bad == "stop", self.progress)
        return train_bpe(texts, self.run.tokenizer.vocab_size)


def _check(run: Run, plan: Plan, corpus: Corpus) -> None:
    first = corpus.stores[0]
    for store in corpus.stores:
        check_pairs(store, run)
        one, other = first.manifest["tokenizer"], store.manifest["tokenizer"]
        if one["fingerprint"] != other["fingerprint"]:
            raise UserError(
                f"data.train: the stores {first.path} and {store.path} have different tokenizers ({one['kind']} of "
                f"{one['vocab_size']}, {other['kind']} of {other['vocab_size']}); prepare them with one"
            )
    is_made = any(isinstance(item, Recipe) for item in plan.items)
    if run.data.validation and is_made and not corpus.validation:
        raise UserError(
            f"data.validation = {run.data.validation!r}: holds out no document of any source; raise the share, give a "
            "file of its own, or set it to 0"
        )


def _open_own(recipe: Recipe) -> Store:
    store = Store.open(recipe.path)
    tidy(recipe.path)
    found, made_from = store.manifest["made_from"], recipe.made_from
    there, here = identity(found), identity(made_from)
    differences = [
        f"{name} {_show(found.get(name))} there, {_show(made_from.get(name))} here"
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise UserError(
            f"data.store: the store at {recipe.path} was made from something else ({'; '.join(differences)}); name "
            "another folder, or remove that one to have it made anew"
        )
    return store


def _show(part: Any) -> str:
    if not isinstance(part, dict):
        return repr(part)
    if "kind" in part:
        return f"{part['kind']} of {part['vocab_size']}" if "vocab_size" in part else part["kind"]
    return f"{part.get('name')!r} (fingerprint {str(part.get('fingerprint'))[:8]})"


def _left_out(recipe: Recipe, store: Store) -> str:
    left_out, duplicates = store.manifest["left_out"], store.manifest["duplicates"]
    parts = []
    if left_out["documents"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in left_out["kinds"].items())
        parts.append(f"{left_out['documents']:,} that can't be used ({kinds}; the first {left_out['examples'][0]})")
    if duplicates:
        parts.append(f"{duplicates:,} duplicates")
    name = f"{recipe.name}: " if recipe.name else ""
    return f"{name}documents left out: {', '.join(parts)}" if parts else ""


def _silent(stage: str, done_bytes: int, total_bytes: int | None, tokens: int, documents: int) -> None:
    pass


def _unheard(text: str) -> None:
    pass
