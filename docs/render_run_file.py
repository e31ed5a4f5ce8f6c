"""Renders the tables of `docs/run-file.md` from the code: `python docs/render_run_file.py`.

Keys, types and defaults come from the pydantic models; meanings are the strings below their fields. A
test checks that the file is current.
"""

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshwright.config import ModelSection, Run
from meshwright.config_base import Section
from meshwright.config_data import DataSection, MixedSource, SourceKeys, WeightFrom
from meshwright.models.spec import ModelSpec, presets

PAGE = Path(__file__).with_name("run-file.md")

# Keys that come first in their tables, and the lists of tables by where they stand.
FIRST: dict[type, tuple[str, ...]] = {ModelSection: ("preset", "init", "config"), DataSection: ("train", "validation")}
LISTS: dict[str, dict[str, type[Section]]] = {"data": {"[data.train]": MixedSource, "[data.train.later]": WeightFrom}}


def keys() -> dict[str, list[dict[str, str]]]:
    """By section (the top level is the empty name), its keys: `name`, `type`, `default` and `meaning`.

    A list of tables follows the section that it is part of, under its name in brackets.
    """
    schema = Run.model_json_schema()
    sections: dict[str, list[dict[str, str]]] = {"": []}
    for name, field in Run.model_fields.items():
        section = field.annotation
        if not (inspect.isclass(section) and issubclass(section, BaseModel)):
            sections[""].append(_key("", name, schema, Run))
            continue
        for title, table in {name: section, **LISTS.get(name, {})}.items():
            part = schema["$defs"][table.__name__]
            sections[title] = [_key(title, key, part, table) for key in _in_order(table)]
    return sections


def _in_order(section: type) -> list[str]:
    first = FIRST.get(section, ())
    return [*first, *(name for name in section.model_fields if name not in first)]


def _key(section: str, name: str, schema: dict[str, Any], model: type) -> dict[str, str]:
    path = f"{section}.{name}" if section else name
    own = _docstrings(model).get(name) or (_docstrings(SourceKeys).get(name) if model is MixedSource else None)
    if own is None:
        raise ValueError(f"{path}: says nothing of what it means; write a string below the field in config.py")
    facts = schema["properties"][name]
    if name in schema.get("required", []):
        default = "(must be given)"
    elif model is ModelSection and name in ModelSpec.model_fields and name not in FIRST[ModelSection]:
        default = "the preset's"
    elif facts["default"] is None:
        default = "as in `[data]`"
    else:
        default = f"`{_toml(facts['default'])}`"
    return {"name": name, "type": _type(facts), "default": default, "meaning": own}


def _docstrings(model: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not one.__module__.startswith("meshwright"):
            continue
        body = ast.parse(inspect.getsource(one)).body[0].body
        for field, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def _type(facts: dict[str, Any]) -> str:
    if choices := facts.get("anyOf") or facts.get("oneOf"):
        return " or ".join(_type(one) for one in choices if one.get("type") != "null")
    if facts.get("type") == "array":
        return "list of tables" if "$ref" in facts["items"] else f"list of {_type(facts['items'])}s"
    if "const" in facts:
        return f"`{_toml(facts['const'])}`"
    if "enum" in facts:
        return ", ".join(f"`{_toml(value)}`" for value in facts["enum"])
    words = {"integer": "integer", "number": "number", "string": "string", "boolean": "`true`, `false`"}[facts["type"]]
    limits = {"exclusiveMinimum": "> {}", "minimum": "≥ {}", "exclusiveMaximum": "< {}", "maximum": "≤ {}"}
    bounds = [form.format(f"{facts[limit]:.12g}") for limit, form in limits.items() if limit in facts]
    return f"{words} {', '.join(bounds)}" if bounds else words


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def key_tables() -> str:
    """The tables of all sections, as Markdown."""
    parts = []
    tables = {name: table for lists in LISTS.values() for name, table in lists.items()}
    for section, rows in keys().items():
        title = f"### `[{section}]`" if section else "### Top level"
        about = getattr(Run.model_fields.get(section), "annotation", None) or tables.get(section)
        lines = [title, "", inspect.cleandoc(about.__doc__).split("\n")[0] if about else "Above the first section.", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for row in rows:
            meaning = row["meaning"].replace("|", "\\|")
            lines.append(f"| `{row['name']}` | {row['type']} | {row['default']} | {meaning} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def preset_table() -> str:
    """The presets and their sizes, as Markdown."""
    columns = ("layers", "width", "heads", "kv_heads", "ffn_width", "context_length")
    choices = ("positions", "norm", "activation")
    lines = [f"| preset | {' | '.join(columns + choices)} |", "|---" + "|---:" * len(columns) + "|---" * 3 + "|"]
    for name, spec in presets().items():
        values = [f"{getattr(spec, column):,}" for column in columns]
        values += [getattr(spec, choice) for choice in choices]
        lines.append(f"| `{name}` | {' | '.join(values)} |")
    return "\n".join(lines)


def render(page: str) -> str:
    """The page with its tables rendered anew."""
    for name, table in {"keys": key_tables(), "presets": preset_table()}.items():
        begin, end = f"<!-- {name}: generated by docs/render_run_file.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{PAGE.name}: the markers of {name!r} are missing")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
