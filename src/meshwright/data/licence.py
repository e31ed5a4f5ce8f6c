"""Taking the licence off the head of source code."""

import re

_MENTIONS = re.compile(r"copyright|licen[cs]e|SPDX", re.IGNORECASE)
_BLANK = re.compile(r"(?:[ \t]*\r?\n)*")
# What must stay a file's first lines: what runs it, and what says how it is encoded.
_FIRST = re.compile(r"\ufeff?(?:#![^\n]*(?:\n|\Z))?(?:[ \t]*#[^\n]*coding[:=][^\n]*(?:\n|\Z)|<\?xml[^>]*\?>)?")
# In C a # begins a directive, in Rust an attribute, in Lua --[[ a block. Documentation comments (/// and //!) are
# another block than the // above them.
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(?:include|define|if|ifdef|ifndef|import|pragma|undef|error|line)\b")
_MARKERS = [r"//!", r"///", r"//(?![/!])", r"#(?=[\s#*=+~\-]|[A-Z(©]|\Z)", r"--(?!\[)", r";"]
_LINES = [re.compile(rf"(?:[ \t]*{marker}[^\n]*(?:\n|\Z))+") for marker in _MARKERS]
_BLOCKS = {"/*": "*/", "<!--": "-->", '"""': '"""', "'''": "'''"}


def without_licence(text: str) -> str:
    """The text without its first comment, where that speaks of copyright or a licence; else the text as it is.

    A comment is a run of lines that begin with `//`, `#`, `--` or `;`, or what lies between `/*` and `*/`, `<!--` and
    `-->`, or triple quotes. A first line that says what runs the file, or how it is encoded, stays.

    Arguments:
        text: source code in any language.
    """
    first = _end(_FIRST, text, 0)
    start = _end(_BLANK, text, first)
    end = _comment_end(text, start)
    if end <= start or not _MENTIONS.search(text, start, end):
        return text
    return text[:first] + text[_end(_BLANK, text, end) :]


def _comment_end(text: str, start: int) -> int:
    begin = start + len(text[start : start + 64]) - len(text[start : start + 64].lstrip(" \t"))
    for opening, closing in _BLOCKS.items():
        if text.startswith(opening, begin):
            found = text.find(closing, begin + len(opening))
            return found + len(closing) if found >= 0 else start
    if _DIRECTIVE.match(text, start):
        return start
    return max(_end(pattern, text, start) for pattern in _LINES)


def _end(pattern: re.Pattern, text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start
