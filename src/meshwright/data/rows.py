"""One row, or one text, to one document; what can't be one comes out with its fault."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.config_data import SourceKeys
from meshwright.data.licence import without_licence

ANSWERS = ("chosen", "rejected")
"""Columns of a pair."""

_MISSING = object()
Messages = tuple[dict[str, str], ...]
Turn = tuple[str, Any, Any]
"""What to call it, its role and its content, which may be anything yet."""

_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}


class Item(NamedTuple):
    """A document within its file."""

    number: int
    text: str = ""
    fault: str = ""
    messages: tuple[dict[str, str], ...] = ()
    rejected: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class Rules:
    """How rows and texts become documents."""

    field: str = "text"
    separator: bytes = b""
    max_document_mb: float = 64.0
    strip_licence: bool = False
    chat: str = ""
    pairs: bool = False

    @staticmethod
    def of(keys: Any, *, pairs: bool = False) -> "Rules":
        """The rules of anything with the attributes of `SourceKeys`.

        Arguments:
            keys: have those attributes.
            pairs: whether a row is a pair of answers, a chosen and a rejected one.
        """
        return Rules(keys.field, keys.separator.encode(), keys.max_document_mb, keys.strip_licence, keys.chat, pairs)

    @property
    def limit(self) -> int:
        """Bytes of the largest document."""
        return int(self.max_document_mb * 1_000_000)

    def too_large(self, size: int | str) -> str:
        """The fault of a document of so many bytes."""
        size = f"{size:,}" if isinstance(size, int) else size
        return f"too large ({size} bytes; data.max_document_mb = {self.max_document_mb:g})"

    def changed(self) -> dict[str, Any]:
        """The rules that aren't the default, for a fingerprint."""
        usual = Rules.of(SourceKeys())
        both = {name: (getattr(self, name), getattr(usual, name)) for name in self.__dataclass_fields__}
        return {
            name: value.decode() if isinstance(value, bytes) else value
            for name, (value, default) in both.items()
            if value != default
        }

    def columns(self, names: list[str]) -> list[str]:
        """What to read of a table, dotted where it is nested; nothing where the table lacks it.

        Arguments:
            names: the table's columns.
        """
        if self.pairs:
            there = [name for name in ("prompt", *ANSWERS) if name in names]
            return there if set(ANSWERS) <= set(there) else []
        if self.chat and self.field == "text":
            wanted = ["messages"] if "messages" in names else ["prompt", "completion"]
            return wanted if set(wanted) <= set(names) else []
        return [self.field] if self.field in names or self.field.split(".")[0] in names else []

    def roots(self, names: list[str]) -> list[str]:
        """As `columns`, the table's own columns where these are nested."""
        return sorted({name if name in names else name.split(".")[0] for name in self.columns(names)})

    def missing(self, names: list[str]) -> str:
        """The fault of a whole table that lacks what is wanted."""
        wanted = "messages, or prompt and completion" if self.chat and self.field == "text" else self.field
        wanted = " and ".join(ANSWERS) if self.pairs else wanted
        return f"missing field ({wanted}; there are {', '.join(names[:20]) or 'no columns'})"


def from_text(number: int, text: str, rules: Rules) -> Item:
    """A text as a document."""
    # A character is at most 4 bytes, so nearly all texts need no count.
    if len(text) * 4 > rules.limit and (size := len(text.encode(errors="surrogatepass"))) > rules.limit:
        return Item(number, fault=rules.too_large(size))
    if rules.strip_licence:
        text = without_licence(text)
    fault = _fault(text) if text else "empty"
    return Item(number, fault=fault) if fault else Item(number, text)


def from_bytes(number: int, data: bytes, rules: Rules) -> Item:
    """UTF-8 as a document."""
    try:
        return from_text(number, data.decode(), rules)
    except UnicodeDecodeError as error:
        return Item(number, fault=not_utf8(error))


def not_utf8(error: UnicodeDecodeError) -> str:
    """The fault of bytes that aren't UTF-8."""
    return f"not UTF-8 (byte {error.start})"


def from_row(number: int, row: dict[str, Any], rules: Rules) -> Item:
    """A row of JSON lines, Parquet, CSV or a dataset as a document."""
    if rules.pairs:
        return _usable(number, rules, *(_answered(row, name) for name in ANSWERS))
    if rules.chat:
        return _usable(number, rules, _checked(_turns(row, rules)))
    value = _find(row, rules.field)
    if isinstance(value, str):
        return from_text(number, value, rules)
    if isinstance(value, bytes):
        return from_bytes(number, value, rules)
    return Item(number, fault=_not_text(rules.field, value))


def from_table(first: int, table: Any, rules: Rules) -> Iterator[Item]:
    """The rows of an Arrow table or record batch as documents.

    Arguments:
        first: the number of its first row.
        table: may have more columns than the rules ask for.
        rules: how rows become documents.
    """
    names = rules.roots(table.schema.names)
    columns = [table.column(name) for name in names]
    try:
        values = [column.to_pylist() for column in columns]
    except UnicodeDecodeError:
        values = None
    for place in range(table.num_rows):
        if values is not None:
            row = dict(zip(names, (column[place] for column in values), strict=True))
        else:  # some row isn't UTF-8, so each is taken by itself
            try:
                row = dict(zip(names, (column[place].as_py() for column in columns), strict=True))
            except UnicodeDecodeError as error:
                yield Item(first + place, fault=not_utf8(error))
                continue
        yield from_row(first + place, row, rules)


def _find(row: dict[str, Any], field: str) -> Any:
    if field in row:
        return row[field]
    value: Any = row
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _fault(text: str) -> str:
    if (nul := text.find("\0")) >= 0:
        return f"NUL byte (at {nul})"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"lone surrogate (half a character, at {error.start})"
    return ""


def _not_text(field: str, value: Any, wanted: str = "text") -> str:
    if value is _MISSING:
        return f"missing field ({field})"
    if value is None:
        return f"missing field ({field} is null)"
    return f"field isn't {wanted} ({field} is {_KINDS.get(type(value), type(value).__name__)})"


def _usable(number: int, rules: Rules, *conversations: Messages | str) -> Item:
    """One conversation, or a chosen and a rejected one, as a document; a text in place of one is its fault."""
    whole = [one for one in conversations if not isinstance(one, str)]
    if faults := [one for one in conversations if isinstance(one, str)]:
        return Item(number, fault=faults[0])
    size = sum(len(message["content"].encode()) for one in whole for message in one)
    if not size or size > rules.limit:
        return Item(number, fault=rules.too_large(size) if size else "empty")
    return Item(number, "", "", *whole)


def _checked(turns: list[Turn] | str) -> Messages | str:
    if isinstance(turns, str):
        return turns
    for where, role, content in turns:
        for name, value in ((f"role of {where}", role), (where, content)):
            fault = _fault(value) if isinstance(value, str) else _not_text(name, value)
            if fault:
                return fault
    return tuple({"role": role, "content": content} for _, role, content in turns)


def _answered(row: dict[str, Any], name: str) -> Messages | str:
    """The whole conversation that ends with one of a pair's answers; or a fault."""
    prompt, answer = row.get("prompt"), row.get(name, _MISSING)
    if prompt is None and isinstance(answer, str):
        return "missing field (prompt)"
    messages = _checked(_said(name, answer, "assistant"))
    before = () if prompt is None else _checked(_said("prompt", prompt, "user"))
    if isinstance(messages, str) or isinstance(before, str):
        return messages if isinstance(messages, str) else before
    if messages and before and messages[: len(before)] != before:
        if messages[0]["role"] != "assistant":
            return f"two prompts ({name} neither is an answer to prompt nor begins with it)"
        messages = before + messages
    if not messages or messages[-1]["role"] != "assistant":
        return f"no answer (the last turn of {name} isn't the assistant's)"
    return messages


def _said(name: str, value: Any, role: str) -> list[Turn] | str:
    if isinstance(value, str):
        return [(name, role, value)]
    return _listed(name, value) if isinstance(value, list) else _not_text(name, value, "text or a list")


def _listed(name: str, turns: list[Any]) -> list[Turn] | str:
    named = [(f"{name}[{place}]", turn) for place, turn in enumerate(turns)]
    for where, turn in named:
        if not isinstance(turn, dict):
            return _not_text(where, turn, "an object")
    return [(where, turn.get("role", _MISSING), turn.get("content", _MISSING)) for where, turn in named]


def _turns(row: dict[str, Any], rules: Rules) -> list[Turn] | str:
    field = rules.field if rules.field != "text" else "messages"
    turns = _find(row, field)
    if field == "messages" and turns in (_MISSING, None):
        if "prompt" not in row and "completion" not in row:
            return "missing field (messages, or prompt and completion)"
        pairs = (("prompt", "user"), ("completion", "assistant"))
        return [(name, role, row.get(name, _MISSING)) for name, role in pairs]
    return _listed(field, turns) if isinstance(turns, list) else _not_text(field, turns, "a list")
