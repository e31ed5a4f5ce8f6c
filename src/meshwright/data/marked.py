"""Text of two kinds in one: what a chat template writes, where special tokens count, and what people wrote.

In both, all else is encoded as one text, so that a special token's look-alike in a message changes nothing around it.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Piece = tuple[str, bool]
"""Text, and whether special tokens in it count as such."""

Span = Sequence[Piece]
"""Pieces that are encoded as one text; nothing is merged across its borders."""


def find_special(special_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """What finds special tokens in text, the longest first; None where there are none."""
    names = sorted(filter(None, special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def split_special(span: Span, pattern: re.Pattern[str] | None) -> Iterator[Piece]:
    """The special tokens that count, each with True, and the text around them, with False."""
    parts = ((part, mark) for text, marked in span for part, mark in _found(text, pattern if marked else None) if part)
    for mark, group in groupby(parts, key=lambda part: part[1]):
        if mark:
            yield from group
        else:
            yield "".join(text for text, _ in group), False


def encode_apart(
    spans: Iterable[Span], special_tokens: Mapping[str, int], encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """The ids of each span, for a tokenizer that encodes a text alike wherever it stands."""
    pattern = find_special(special_tokens)
    return [
        [i for text, mark in split_special(span, pattern) for i in ([special_tokens[text]] if mark else encode(text))]
        for span in spans
    ]


class SpanEncoder:
    """Encodes spans with a tokenizer of the `tokenizers` library.

    Such a tokenizer takes special tokens for text everywhere or nowhere. So in a copy of it each has a stand-in, a
    random word that always counts, and likewise each border between spans. Then one call encodes everything, and no
    text looks to the tokenizer like the first of a document, before which many put a space.

    Some put a space before any text that follows a special token. For those, borders can't be kept: spans are encoded
    as one text, and a token that crosses a border belongs to the later span.

    Arguments:
        tokenizer: a `tokenizers.Tokenizer`; stays as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._copy = Tokenizer.from_str(tokenizer.to_str())
        self._copy.no_truncation()
        self._copy.no_padding()
        self._copy.encode_special_tokens = True
        special = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._pattern = find_special(token.content for token in special.values())
        nonce = secrets.token_hex(8)
        self._border = f"\ufdd0{nonce}\ufdd1"
        self._stand_in = {token.content: f"\ufdd0{nonce}.{i}\ufdd1" for i, token in special.items()}
        self._copy.add_tokens([AddedToken(self._border, normalized=False)])
        self._copy.add_tokens(
            [
                AddedToken(
                    self._stand_in[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for token in special.values()
            ]
        )
        self._border_id = self._copy.token_to_id(self._border)
        self._special_of = {self._copy.token_to_id(self._stand_in[token.content]): i for i, token in special.items()}
        probe = self._copy.encode(f"{self._border}a", add_special_tokens=False).tokens[1:]
        self._apart = not "".join(probe).startswith(("▁", "Ġ"))

    def encode(self, spans: Sequence[Span]) -> list[list[int]]:
        """The ids of each span."""
        text, starts, owners = self._lay_out(spans)
        encoding = self._copy.encode(text, add_special_tokens=False)
        encoded: list[list[int]] = [[] for _ in spans]
        owner, part = iter(owners), 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._special_of:
                encoded[next(owner)].append(self._special_of[token])
            elif token != self._border_id:
                while part + 1 < len(starts) and starts[part + 1][0] <= max(start, end - 1):
                    part += 1
                encoded[starts[part][1]].append(token)
        return encoded

    def _lay_out(self, spans: Sequence[Span]) -> tuple[str, list[tuple[int, int]], list[int]]:
        # The text to encode; where in it each part starts and of which span it is; the span of each special token.
        parts = [(text, mark, i) for i, span in enumerate(spans) for text, mark in split_special(span, self._pattern)]
        laid: list[str] = []
        starts: list[tuple[int, int]] = []
        length, before = 0, (True, -1)
        for text, mark, i in parts:
            # Special tokens are borders already, and some take the whitespace beside them, border or not.
            if self._apart and not mark and not before[0] and before[1] != i:
                laid.append(self._border)
                length += len(self._border)
            before = (mark, i)
            laid.append(self._stand_in[text] if mark else text)
            starts.append((length, i))
            length += len(laid[-1])
        return "".join(laid), starts, [i for _, mark, i in parts if mark]


def _found(text: str, pattern: re.Pattern[str] | None) -> Iterator[Piece]:
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], False
        yield match.group(), True
        start = match.end()
    yield text[start:], False
