"""What is written over a run file before it is checked: `section.key=value` of the command line; this user's home."""

import os
import tomllib
from collections.abc import Sequence
from typing import Any

from meshwright.errors import UserError
from meshwright.starting import has_every_key

_STARTS = ("preset", "init", "config", "family")
_PATHS = (("", "run_dir"), ("data", "store"), ("data", "chat"), ("tokenizer", "kind"), ("model", "init"))


def apply_overrides(values: dict[str, Any], overrides: Sequence[str], sections: Any) -> None:
    """Write overrides over a run, in order.

    Arguments:
        values: of the run file; changed in place.
        overrides: `section.key=value` strings. A value is TOML; what isn't TOML is taken as a string, and so is what is
            given to a key that takes nothing else.
        sections: the model of the run file, whose fields say what a key takes.

    Raises:
        UserError: one has another form, or what it asks of a resolved run file can't be done.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides = {overrides!r}: must be a list of section.key=value strings")
    before = dict(model) if isinstance(model := values.get("model"), dict) and has_every_key(model) else None
    given = [_apply(values, override, sections) for override in overrides]
    if before:
        _derive_anew(values["model"], before, {path[-1] for path in given if path[0] == "model"})


def expand_home(values: dict[str, Any]) -> None:
    """Put this user's home in the place of a `~` that begins a path."""
    for section, key in _PATHS:
        keys = values.get(section) if section else values
        if isinstance(keys, dict) and isinstance(path := keys.get(key), str):
            start = "hf:" if path.startswith("hf:") else ""
            if path.startswith(f"{start}~"):
                keys[key] = start + os.path.expanduser(path.removeprefix(start))


def _apply(values: dict[str, Any], override: str, sections: Any) -> list[str]:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise UserError(f"{override!r}: an override has the form section.key=value")
    path = key.strip().split(".")
    for section in path[:-1]:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"{override!r}: {section!r} is a key, not a section; write it without what follows the dot")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    values[path[-1]] = value if isinstance(value, str) or not _takes_text_alone(path, sections) else text.strip()
    return path


def _takes_text_alone(path: list[str], sections: Any) -> bool:
    for part in path:
        field = getattr(sections, "model_fields", {}).get(part)
        if field is None:
            return False
        sections = field.annotation
    return sections is str


def _derive_anew(model: dict[str, Any], before: dict[str, Any], given: set[str]) -> None:
    """Have what follows from other keys follow from those of a resolved run file, too, as it does over a preset."""
    for key in _STARTS:
        if model.get(key) != before.get(key):
            raise UserError(
                f"model.{key} = {model[key]!r}: can't be set over a resolved run file, which has every other key of "
                "[model]; start from the run file that it was made from, or set those keys themselves"
            )
    if {"heads", "width"} & given and "head_width" not in given:
        model["head_width"] = 0
    if "heads" in given and "kv_heads" not in given and before["kv_heads"] == before["heads"]:
        model["kv_heads"] = 0
