"""What the stores of a run are to be made from, before anything is read."""

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import Run, TokenizerSection
from meshwright.config_data import DataSection, MixedSource
from meshwright.data.chat import make_template
from meshwright.data.documents import Source
from meshwright.data.make import Recipe
from meshwright.data.mixing import stages_of
from meshwright.data.partial import identity
from meshwright.data.sources import open_source
from meshwright.data.store import Store, is_store, open_nanogpt
from meshwright.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from meshwright.errors import UserError


class Plan(NamedTuple):
    """The stores of a run: those to be made, and those that lie ready."""

    items: list[Recipe | Store]
    names: list[str]
    weights: list[list[tuple[int, float]]]
    tokenizer: Tokenizer | None
    """What encodes; None: to be trained on what the recipes say."""


def plan_stores(run: Run, source: Source | None, tokenizer: Tokenizer | None = None) -> Plan:
    """The stores of a run, in the order of its sources.

    Arguments:
        run: the run.
        source: documents from Python, in place of `data.train`.
        tokenizer: what encodes, in place of `tokenizer.kind`.

    Raises:
        UserError: a source or the tokenizer can't be had, a store that lies ready has another tokenizer, or the
            weights can't be used.
    """
    listed = run.data.sources
    if source is not None:
        names, weights = names_of([source.describe()["name"]]), [[(0, 1.0)]]
        found: list[Source | Store] = [source]
        keys: list[MixedSource | DataSection] = [run.data]
    else:
        names = names_of([one.source for one in listed])
        weights = [[(0, one.weight), *((later.step, later.weight) for later in one.later)] for one in listed]
        stages_of(weights)  # refuses those that can't be used, before any work
        found, keys = [_open(run, one) for one in listed], [*listed]
        if all(is_store(one.source) for one in listed):
            _check_ready(run.data, [one for one in found if isinstance(one, Store)])
    ready = [one for one in found if isinstance(one, Store)]
    if tokenizer is None and len(ready) < len(found):
        if run.tokenizer.kind != "bpe":
            tokenizer = open_tokenizer(run.tokenizer.kind, run.tokenizer.add_bos)
        elif ready:
            tokenizer = ready[0].tokenizer()
        elif run.model.init != "random" and "kind" not in run.tokenizer.model_fields_set:
            raise UserError(
                f"model.init = {run.model.init!r}: came without a tokenizer (tokenizer.json), and its ids mean nothing "
                "without; save the tokenizer there (AutoTokenizer.from_pretrained(…).save_pretrained(…)), or set "
                "tokenizer.kind"
            )
    items = _Planning(run, tokenizer, found, names, keys).items()
    return Plan(items, names, weights, tokenizer)


class _Planning:
    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer | None,
        found: list[Source | Store],
        names: list[str],
        keys: list[MixedSource | DataSection],
    ) -> None:
        self.run, self.tokenizer, self.found, self.names, self.keys = run, tokenizer, found, names, keys
        self.described = {i: one.describe() for i, one in enumerate(found) if not isinstance(one, Store)}
        self.held_out: Source | None = None
        if isinstance(run.data.validation, str) and self.described:
            self.held_out = open_source(
                run.data.validation, run.data, "data.validation", pairs=run.data.packing == "pairs"
            )

    def items(self) -> list[Recipe | Store]:
        """A recipe for each source that isn't a store."""
        return [one if isinstance(one, Store) else self._recipe(i, one) for i, one in enumerate(self.found)]

    def _recipe(self, index: int, source: Source) -> Recipe:
        data, alone = self.run.data, len(self.found) == 1
        is_first = index == min(self.described)
        share = 0.0 if isinstance(data.validation, str) else float(data.validation)
        validation = self.held_out if self.held_out is not None and is_first else share
        apart = self.held_out if data.deduplicate and not is_first else None
        made_from = {
            "source": self.described[index],
            "validation": validation if isinstance(validation, float) else validation.describe(),
            "separator": self.keys[index].separator,
            "tokenizer": self._tokenizer(),
        }
        if data.normalize != "none":
            made_from["normalize"] = data.normalize
        if data.deduplicate:
            made_from["deduplicate"] = True
        if apart is not None:
            made_from["apart_from"] = apart.describe()
        if data.packing == "pairs":
            made_from["pairs"] = True
        chat = self.keys[index].chat or (data.chat if isinstance(data.validation, str) else "")
        if data.packing == "pairs" and not chat:
            raise UserError(
                f"data.chat = {chat!r}: data.packing = {data.packing!r} reads conversations, which a template writes "
                'as text; set it, such as to "chatml"'
            )
        if chat:
            # One that is to be trained gives a template what one trained on nothing does.
            tokenizer = self.tokenizer or train_bpe([], 257)
            made_from["chat"] = {"name": chat, "fingerprint": make_template(chat, tokenizer).identity()}
        path = Path(data.store or f"stores/{_key(made_from)}")
        if data.store and not alone:
            path /= f"{index + 1}-{self.names[index]}"
        named = data.train if isinstance(data.train, str) else self.described[index]["name"]
        key = f"data.train = {named!r}" if alone else f"data.train, source {named!r}"
        name = "" if alone else self.names[index]
        return Recipe(name, key, path, source, validation, apart, chat, made_from)

    def _tokenizer(self) -> dict[str, Any]:
        if self.tokenizer is not None:
            return {"kind": self.tokenizer.kind, "fingerprint": self.tokenizer.fingerprint}
        section: dict[str, Any] = {"kind": "bpe", "vocab_size": self.run.tokenizer.vocab_size}
        if len(self.described) > 1:
            section["trained_on"] = [described["fingerprint"] for described in self.described.values()]
        return section


def _open(run: Run, one: MixedSource) -> Source | Store:
    if one.source.endswith(".bin"):
        if isinstance(run.data.train, list) and len(run.data.train) > 1:
            raise UserError(
                f"data.train, source {one.source!r}: a nanoGPT .bin must be the only source; give the text of it"
            )
        return _open_nanogpt(run, one.source)
    if is_store(one.source):
        return _open_ready(run, one.source)
    return open_source(one.source, one, pairs=run.data.packing == "pairs")


def _open_ready(run: Run, path: str) -> Store:
    store = Store.open(path)
    found, asked = store.manifest["tokenizer"], run.tokenizer
    if asked.kind == "bpe":
        size = store.manifest["made_from"]["tokenizer"].get("vocab_size", found["vocab_size"])
        same = found["kind"] == "bpe" and size == asked.vocab_size
        here = f"bpe of {asked.vocab_size}"
    else:
        size = found["vocab_size"]
        tokenizer = open_tokenizer(asked.kind, asked.add_bos)
        same = tokenizer.fingerprint == found["fingerprint"]
        here = f"{asked.kind} (fingerprint {tokenizer.fingerprint[:8]})"
    if not same:
        mend = f'kind = "{found["kind"]}"' + (f", vocab_size = {size}" if found["kind"] == "bpe" else "")
        raise UserError(
            f"tokenizer.kind = {asked.kind!r}: the store {path} was made with {found['kind']} of {size} "
            f"(fingerprint {found['fingerprint'][:8]}), not {here}; write {mend} under [tokenizer], or name "
            "another store"
        )
    return store


def _check_ready(data: DataSection, stores: list[Store]) -> None:
    for store in stores:
        made = store.manifest["made_from"]
        validation = made["validation"]
        theirs = {
            "validation": validation["name"] if isinstance(validation, dict) else validation,
            "normalize": made.get("normalize", "none"),
            "deduplicate": made.get("deduplicate", False),
            "chat": made.get("chat", {}).get("name", ""),
        }
        for key, value in theirs.items():
            if (asked := getattr(data, key)) not in (value, DataSection.model_fields[key].default):
                raise UserError(
                    f"data.{key} = {asked!r}: the store {store.path} was made with {value!r}, and stays so; leave the "
                    "key out, or name the text that the store was made from"
                )


def _open_nanogpt(run: Run, path: str) -> Store:
    if not isinstance(run.data.validation, str):
        raise UserError(
            f"data.validation = {run.data.validation}: beside a .bin as data.train it must be a path; give val.bin's"
        )
    kind = run.tokenizer.kind
    if run.tokenizer == TokenizerSection():
        kind = "tiktoken:gpt2"  # what nanoGPT writes
    if kind == "bpe":
        raise UserError(
            "tokenizer.kind = 'bpe': a .bin is encoded already; name the tokenizer that wrote it, such as tiktoken:gpt2"
        )
    return open_nanogpt(path, run.data.validation, open_tokenizer(kind, run.tokenizer.add_bos))


def _key(made_from: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity(made_from), sort_keys=True).encode()).hexdigest()[:16]


def names_of(specs: list[str]) -> list[str]:
    """Short names of sources, all different, that may name a folder.

    Arguments:
        specs: as in a run file.
    """
    names: list[str] = []
    for spec in specs:
        parts = [part for part in spec.split("/") if part.strip(".") and not any(sign in part for sign in "*?[")]
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "")[:40].strip("-.") or "source"
        numbered = (f"{short}-{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([short], numbered) if name not in names))
    return names
