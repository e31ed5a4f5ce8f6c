"""What a run file takes over from the checkpoint that its run starts from, or from a preset. Imports no framework."""

import json
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.models.spec import ANY, ModelSpec, preset

CHANGEABLE = {"context_length", "dropout", "capacity_factor", "balance_loss", "router_z_loss"} | {
    key for key in ModelSpec.model_fields if key.startswith("rope_")
}
"""Keys of the spec that may differ from those of the checkpoint: no parameter depends on them."""


def has_every_key(values: dict[str, Any]) -> bool:
    """Whether `[model]` is that of a resolved run file; `config` is a newer key."""
    return ModelSpec.model_fields.keys() - {"config"} <= values.keys()


def from_preset(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The keys of a preset, under those of a run file.

    Arguments:
        values: of `[model]`.
        name: the preset's.

    Raises:
        UserError: there is none of that name.
    """
    return _over(preset(name), values)


def _over(spec: ModelSpec, values: dict[str, Any]) -> dict[str, Any]:
    base = spec.model_dump()
    if "heads" in values or "width" in values:
        base.pop("head_width")
    if "heads" in values and base["kv_heads"] == base["heads"]:
        base.pop("kv_heads")
    return {**base, **values}


def from_checkpoint(values: dict[str, Any], name: str, init: str) -> dict[str, Any]:
    """The keys of a checkpoint, under those of a run file.

    Arguments:
        values: of `[model]`.
        name: of the preset that it names; empty: none.
        init: `model.init`, other than `random`.

    Raises:
        UserError: there is no such checkpoint, its architecture can't be represented, or a key is another there.
    """
    if values.get("config"):
        raise UserError("model.config: comes with the checkpoint that model.init names; leave one of them out")
    values = {key: value for key, value in values.items() if key != "config"}
    theirs = _architecture(init, values.get("family", ""), values.get("dropout"))
    if theirs.family == ANY and "dropout" in values:
        theirs = _other(theirs, dropout=values["dropout"])
    given = from_preset(values, name) if name else values
    free = CHANGEABLE - ({"context_length"} if theirs.positions == "learned" else set())
    if theirs.family == ANY:
        free = set()
    for key in ModelSpec.model_fields:
        value, there = given.get(key), getattr(theirs, key)
        if key in given and value != there and key not in free and (key, value) != ("vocab_size", 0):
            raise UserError(
                f"model.{key} = {value!r}: the checkpoint {init!r} has {there!r}; leave it out, as all that its "
                "parameters depend on comes from there"
            )
    kept = {key: value for key, value in values.items() if key in free}  # not a preset's: the checkpoint goes first
    return {**theirs.model_dump(), **values, **kept, "vocab_size": theirs.vocab_size}


def from_config(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json`, under those of a run file.

    Arguments:
        values: of `[model]`, with `config`.

    Raises:
        UserError: there is no such config, it can't be represented, or a key is another there and can't be changed.
    """
    config = values["config"]
    if not config.startswith("hf:"):
        raise UserError(f"model.config = {config[:40]!r}: must be hf:<folder or name>, where a config.json is")
    theirs = _read(config, "model.config", values.get("family", ""), values.get("dropout"))
    if theirs.family != ANY:
        return {**_over(theirs, values), "config": ""}
    values = {key: value for key, value in values.items() if key != "config" and (key, value) != ("vocab_size", 0)}
    theirs = _other(theirs, **{key: values[key] for key in ("vocab_size", "dropout") if key in values})
    theirs = _without_padding(theirs)
    for key in ModelSpec.model_fields:
        if key in values and values[key] != getattr(theirs, key):
            raise UserError(
                f"model.{key} = {values[key]!r}: the config {config!r} has {getattr(theirs, key)!r}; change it there, "
                "or leave it out"
            )
    return {**theirs.model_dump(), "preset": "", "init": "random"}


def _other(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec of the family `ANY` with another vocabulary or dropout; what isn't a number is left for the check."""
    from meshwright.models.hf import any_model, hf_from_spec

    numbers = {key: value for key, value in changes.items() if isinstance(value, int | float) and value >= 0}
    return any_model().spec_from_hf(any_model().changed(hf_from_spec(spec), **numbers))


def _without_padding(spec: ModelSpec) -> ModelSpec:
    from meshwright.models.hf import any_model, hf_from_spec

    return any_model().spec_from_hf(any_model().without_padding(hf_from_spec(spec)))


def _read(kind: str, key: str, family: str, dropout: Any = None) -> ModelSpec:
    from meshwright.hub.reader import read_config
    from meshwright.models.hf import FAMILIES, spec_from_hf

    config = read_config(kind, key)
    if family == ANY or config.get("model_type") not in FAMILIES:
        return spec_from_hf(config, ANY)
    if config["model_type"] == "gpt2" and isinstance(dropout, int | float) and 0 <= dropout < 1:
        # One rate here, three there.
        config = {**config, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return spec_from_hf(config)


def _architecture(init: str, family: str, dropout: Any) -> ModelSpec:
    if init.startswith("hf:"):
        return _read(init, "model.init", family, dropout)
    from meshwright.config import load_run

    run_file = Path(init) / "run.toml"
    if not run_file.is_file():
        raise UserError(
            f"model.init = {init!r}: no such run directory; it can be random, hf:<folder or name>, or a folder that "
            "train wrote"
        )
    return load_run(run_file).model.spec


def tokenizer_of(init: str) -> str | None:
    """The `tokenizer.kind` of what came with a checkpoint; None: nothing did.

    Arguments:
        init: `model.init`, other than `random`.
    """
    if init.startswith("hf:"):
        path = Path(init.removeprefix("hf:")).expanduser()
        if not path.is_dir():
            return init  # on the hub: whether one is there isn't known before it is fetched
        return f"hf:{path}" if (path / "tokenizer.json").is_file() else None
    folder = Path(init) / "tokenizer"
    try:
        kind = json.loads((folder / "spec.json").read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError):
        return None
    return f"hf:{folder}" if kind == "bpe" or kind.startswith("hf:") else kind
