"""Conversations to tokens, and which of them are to be learned: what the assistant says, and that it stops there.

    messages ─▶ rendering of the template ─▶ spans, learned and not ─▶ ids and weights

What a message says is text: a `<|im_end|>` in it becomes ordinary tokens, while the template's own becomes the special
token. To tell them apart, special tokens in messages are rendered as private characters and written back afterwards.
An added token that the tokenizer doesn't call special, such as Qwen3's `<think>`, counts wherever it stands, as in any
document.

Each learned span is encoded by itself and so is the text before it: a prompt has the ids at inference that it had in
training. (Tokenizers that put a space before any text encode all as one, see `marked.py`.)
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshwright.data.marked import Piece, find_special
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError

ROLE = re.compile(r"\w[\w.-]*")
FAULT_CHARACTERS = 200

# What a template that writes the date gets: a store must be the same whenever it is made.
DATE = datetime(2025, 1, 1)


class Turn(NamedTuple):
    """Part of a conversation's text."""

    pieces: list[Piece]
    learned: bool


class Renderer(Protocol):
    """A kind of chat template."""

    def turns(self, messages: list[dict[str, str]]) -> list[Turn]:
        """The text of a conversation in turns, learned and not; raises ValueError as `Template.encode`."""

    def identity(self) -> list[Any]:
        """What its text depends on, but for the messages."""


class Template:
    """Makes tokens of conversations. Can be pickled.

    Arguments:
        renderer: makes text.
        tokenizer: makes tokens of the text.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[dict[str, str]], *, last_alone: bool = False) -> tuple[list[int], list[int]]:
        """Encode a conversation.

        Arguments:
            messages: `role` and `content` of each.
            last_alone: whether what the assistant says before its last turn has weight 0, too.

        Returns:
            The ids, without end of text, and as many weights: 1 for what the assistant says and the mark that ends its
            turn, 0 for the rest, such as the header that opens its turn and the line break after the mark.

        Raises:
            ValueError: the conversation can't be used; says why.
        """
        turns = self._renderer.turns(_checked(messages))
        encoded = self._tokenizer.encode_spans([turn.pieces for turn in turns])
        ids = [token for tokens in encoded for token in tokens]
        learned = [turn.learned for turn in turns]
        if last_alone:
            last = max(number for number, is_learned in enumerate(learned) if is_learned)
            learned = [number == last for number in range(len(turns))]
        weights = [int(is_learned) for is_learned, tokens in zip(learned, encoded, strict=True) for _ in tokens]
        return ids, weights

    def end_weight(self, messages: Sequence[dict[str, str]]) -> int:
        """1 if the assistant has the last turn, so that the end of text after it teaches to stop, else 0."""
        return int(messages[-1]["role"] == "assistant")

    def identity(self) -> str:
        """SHA-256 (hex) of what the text depends on beside the messages; the same wherever the template came from."""
        return hashlib.sha256(json.dumps(self._renderer.identity(), sort_keys=True).encode()).hexdigest()


class ChatML:
    """`<|im_start|>role`, the content from the next line on, `<|im_end|>` and a line break.

    In a tokenizer that lacks the two marks as special tokens they are ordinary text.
    """

    def turns(self, messages: list[dict[str, str]]) -> list[Turn]:
        turns = []
        rest: list[Piece] = []
        for message in messages:
            rest.append((f"<|im_start|>{message['role']}\n", True))
            said = [(message["content"], False), ("<|im_end|>", True)]
            if message["role"] == "assistant":
                turns += [Turn(rest, False), Turn(said, True)]
                rest = []
            else:
                rest += said
            rest.append(("\n", True))
        return [*turns, Turn(rest, False)]

    def identity(self) -> list[Any]:
        return ["chatml"]


class JinjaTemplate:
    """A template as Hugging Face tokenizers have them, rendered as `apply_chat_template` does.

    What the assistant says is what the conversation up to its message has more than the prompt before it; where the
    template writes no prompt for the assistant, it starts where the content does, with the spaces before it. The date
    that it may write is fixed, so that all processes write the same one.

    A template may do with contents as it likes (trim, split, upper case), but for special tokens in them: those must
    come out as they went in, else no one could tell them from the template's own.

    Arguments:
        text: Jinja source.
        tokenizer: names the special tokens.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._special = find_special(tokenizer.special_tokens)
        self._variables = dict(tokenizer.template_variables)

    def turns(self, messages: list[dict[str, str]]) -> list[Turn]:
        hidden = _Hidden(messages, self._special, self._text)
        text = self._render(hidden.messages)
        if hidden.characters and hidden.reveal(text) != self._render(messages):
            raise ValueError("the chat template rewrites special tokens that messages contain")
        turns = []
        done = 0
        for i, message in enumerate(hidden.messages):
            if message["role"] == "assistant":
                start, end = self._answer(hidden, i, text)
                if start < done:
                    raise _changed(i)
                turns += [Turn(hidden.pieces(text[done:start]), False), Turn(hidden.pieces(text[start:end]), True)]
                done = end
        return [*turns, Turn(hidden.pieces(text[done:]), False)]

    def identity(self) -> list[Any]:
        return ["jinja", self._text, self._variables]

    def _answer(self, hidden: "_Hidden", i: int, text: str) -> tuple[int, int]:
        # Where in the text what message i says starts, and where it ends, the mark that ends its turn included.
        before, message = hidden.messages[:i], hidden.messages[i]
        upto = self._render([*before, message])
        if not text.startswith(upto):
            raise _changed(i)
        if before and "add_generation_prompt" in self._text:
            opening = self._render(before, add_generation_prompt=True)
            if not upto.startswith(opening):
                raise ValueError(
                    f"the chat template opens an answer in another way than it renders one (message {i + 1})"
                )
        else:
            unused = hidden.unused * max(1, len(message["content"]))
            probe = self._render([*before, {**message, "content": unused}])
            opening = probe.partition(hidden.unused)[0].rstrip(" ")
            if not upto.startswith(opening):
                raise _changed(i)
        # After a mark, whitespace is for the next turn; where there is no mark, it is what ends this one.
        said = upto[len(opening) :].rstrip()
        marked = said.strip() != message["content"].strip()
        return len(opening), len(opening) + len(said) if marked else len(upto)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        variables = {
            "tools": None,
            "documents": None,
            "strftime_now": DATE.strftime,
            **self._variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _compile(self._text).render(variables)
        except Exception as error:
            reason = " ".join(str(error).split())[:FAULT_CHARACTERS]
            raise ValueError(f"the chat template refuses it ({reason})") from None


class _Hidden:
    # Messages in which each special token is written as private characters, as many as the token has.

    def __init__(self, messages: list[dict[str, str]], special: re.Pattern[str] | None, template: str) -> None:
        contents = "\n".join(message["content"] for message in messages)
        found = sorted(set(special.findall(contents))) if special else []
        taken = set(contents + template)
        unused = (character for code in range(0x100000, 0x110000) if (character := chr(code)) not in taken)
        self.unused = next(unused)
        self.characters = {next(unused): token for token in found}
        self.messages = messages
        if special and found:
            written = {token: character * len(token) for character, token in self.characters.items()}
            self.messages = [
                {**message, "content": special.sub(lambda match: written[match.group()], message["content"])}
                for message in messages
            ]
            self._pattern = re.compile("|".join(map(re.escape, written.values())))

    def reveal(self, text: str) -> str:
        return "".join(part for part, _ in self.pieces(text))

    def pieces(self, text: str) -> list[Piece]:
        if not self.characters:
            return [(text, True)]
        pieces: list[Piece] = []
        start = 0
        for match in self._pattern.finditer(text):
            pieces += [(text[start : match.start()], True), (self.characters[match.group()[0]], False)]
            start = match.end()
        return [*pieces, (text[start:], True)]


def make_template(chat: str, tokenizer: Tokenizer) -> Template:
    """Open what `data.chat` names.

    Arguments:
        chat: `chatml`, `tokenizer` (the template that came with the tokenizer), or the path of a Jinja template.
        tokenizer: makes tokens of the text.

    Raises:
        UserError: there is no such template, Jinja can't parse it, or Jinja isn't installed.
    """
    if chat == "chatml":
        return Template(ChatML(), tokenizer)
    key = f"data.chat = {chat!r}"
    if chat == "tokenizer":
        text = tokenizer.chat_template
        if not text:
            raise UserError(
                f"{key}: the tokenizer {tokenizer.kind!r} has no chat template; choose `chatml`, or give the path of a "
                "Jinja template"
            )
    else:
        try:
            text = Path(chat).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise UserError(
                f"{key}: can't be read ({reason}); choose `chatml`, `tokenizer`, or the path of a Jinja template"
            ) from None
    try:
        import jinja2
    except ImportError:
        raise UserError(f"{key}: needs Jinja; pip install 'meshwright[datasets]'") from None
    try:
        _compile(text)
    except jinja2.TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise UserError(f"{key}: Jinja can't parse line {error.lineno} of the template ({reason}); mend it") from None
    return Template(JinjaTemplate(text, tokenizer), tokenizer)


@lru_cache(maxsize=8)
def _compile(text: str) -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks what is to be learned. Known from the renderings, so it is just a block."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _changed(i: int) -> ValueError:
    return ValueError(f"the chat template changes earlier turns when later ones are added (message {i + 1})")


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not messages:
        raise ValueError("no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages of an unknown structure (message {number} isn't an object)")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages of an unknown structure (message {number} has no text as {key!r})")
        if not ROLE.fullmatch(message["role"]):
            raise ValueError(f"messages of an unknown structure (message {number} has a role that isn't a word)")
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise ValueError(f"holds half a character (a lone surrogate) (message {number})") from None
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no turn of the assistant's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
