"""Text to token ids and back: bytes, byte-pair encodings trained here, tiktoken's, Hugging Face's.

Every kind keeps three rules. What text says is text: a literal `<|endoftext|>` in a document becomes ordinary tokens.
`encode` adds nothing: no beginning, no end of text. And ids that stand for no text (end of text, other special tokens,
ids beyond the vocabulary) decode to nothing. Only `encode_spans` can be told of text in which special tokens count:
what a chat template writes.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.data.marked import Span, SpanEncoder, encode_apart
from meshwright.data.tokenizer_files import read_folder, read_tokenizer, spell_byte_level, spell_sentencepiece
from meshwright.errors import UserError, closest

END_OF_TEXT = "<|endoftext|>"
_ADD_BOS = "meshwright_add_bos"  # in tokenizer_config.json, so that it goes wherever the tokenizer does

# Where a Hugging Face tokenizer doesn't say which token ends a text, the first of these that it knows.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>", "<|im_end|>")

# Where `bpe` may not merge across. A line break takes the punctuation before it and the indentation after it, so `):`
# and the step into the next block can be one token; a word takes up to two signs before it, so ` (self` and `, and`
# can. On the standard library at 4,096 tokens this gives 3.78 bytes a token; GPT-2's rule 3.56, cl100k's 3.55.
BPE_BORDERS = "|".join(
    (
        r"[^\s\p{L}\p{N}_]*\s*[\r\n][ \t]*",
        r"[^\r\n\p{L}\p{N}]{0,2}[\p{L}_]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}_]+",
        r"\s+",
    )
)


class Tokenizer(Protocol):
    """What a tokenizer is to the rest of the data room."""

    kind: str
    """As in the run file: `bytes`, `bpe`, `tiktoken:<name>`, `hf:<name or folder>`."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, end of text included."""

    @property
    def end_of_text(self) -> int:
        """The id that follows each document."""

    @property
    def beginning(self) -> Sequence[int]:
        """The ids that each document and each prompt begin with; most have none."""

    @property
    def begins_elsewhere(self) -> bool:
        """Whether other programs that open it begin each text with a beginning of text."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what maps text to ids, so equal tokenizers have equal ones wherever they came from."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens, by how they are written."""

    @property
    def template_variables(self) -> Mapping[str, str]:
        """Special tokens by the names that chat templates know them by, such as `eos_token`."""

    @property
    def chat_template(self) -> str:
        """The chat template that came with it; empty where none did."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_spans(self, spans: Sequence[Span]) -> list[list[int]]:
        """The ids of each span of a text, some pieces of which may be such that special tokens count in them."""

    def encode_batch(self, texts: list[str]) -> Sequence[list[int] | np.ndarray]:
        """The ids of each text, in the order given; uses every core."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that aren't UTF-8 become U+FFFD."""

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; empty for ids that stand for no text."""

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` reads; makes the folder."""


class ByteTokenizer:
    """One token a byte: ids 0 to 255 are the bytes of UTF-8, 256 is end of text."""

    kind = "bytes"
    vocab_size = 257
    end_of_text = 256
    beginning: Sequence[int] = ()
    begins_elsewhere = False
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    special_tokens: Mapping[str, int] = {END_OF_TEXT: 256}
    template_variables: Mapping[str, str] = {"eos_token": END_OF_TEXT}
    chat_template = ""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_spans(self, spans: Sequence[Span]) -> list[list[int]]:
        return encode_apart(spans, self.special_tokens, self.encode)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [b""]

    def save(self, folder: Path) -> None:
        _write_json(folder / "spec.json", {"kind": self.kind})


class TiktokenTokenizer:
    """One of tiktoken's encodings. It doesn't travel with a store: tiktoken keeps the files in its own cache."""

    chat_template = ""
    beginning: Sequence[int] = ()
    begins_elsewhere = False

    def __init__(self, kind: str) -> None:
        import tiktoken

        name = kind.removeprefix("tiktoken:")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise UserError(f"tokenizer.kind = {kind!r}: tiktoken has no such encoding{closest(name, known)}")
        try:
            self._encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:
            raise UserError(
                f"tokenizer.kind = {kind!r}: tiktoken can't get its files ({type(error).__name__}); connect once, or "
                "set TIKTOKEN_CACHE_DIR to a folder that holds them"
            ) from None
        self.kind = kind
        self.vocab_size = self._encoding.n_vocab
        self.end_of_text = self._encoding.eot_token
        names = sorted(self._encoding.special_tokens_set)
        self.special_tokens = {name: self._encoding.encode_single_token(name) for name in names}
        self.template_variables = {"eos_token": self._encoding.decode([self.end_of_text])}

    @cached_property
    def fingerprint(self) -> str:
        # tiktoken rewrites its regular expressions into faster equal ones, so they stay out of it.
        digest = hashlib.sha256(f"{self._encoding.name} {self.end_of_text}".encode())
        for token, value in enumerate(self.token_bytes()):
            digest.update(b"%d:%d:%b" % (token, len(value), value))
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_spans(self, spans: Sequence[Span]) -> list[list[int]]:
        return encode_apart(spans, self.special_tokens, self.encode)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encode = partial(self._encoding.encode_to_numpy, disallowed_special=())
        threads = _thread_count()
        with ThreadPoolExecutor(threads) as pool:
            return list((pool.map if threads > 1 else map)(encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        return _join(self.token_bytes(), ids).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        special = set(self.special_tokens.values())
        values = [b""] * self.vocab_size
        for token in range(self.vocab_size):
            if token not in special:
                try:
                    values[token] = self._encoding.decode_single_token_bytes(token)
                except KeyError:
                    continue  # cl100k and later leave gaps among their ids
        return values

    def save(self, folder: Path) -> None:
        _write_json(folder / "spec.json", {"kind": self.kind})


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library: trained here (`bpe`), or anyone's `tokenizer.json` (`hf:…`).

    Arguments:
        kind: `bpe` or `hf:<name or folder>`.
        tokenizer: a `tokenizers.Tokenizer`.
        config: what `tokenizer_config.json` says; `eos_token` names the end of text, `chat_template` is one.
        add_bos: whether documents and prompts begin with its `bos_token`. Once asked for, it is so for what `save`
            wrote, too.

    Raises:
        UserError: it has no end-of-text token, or no beginning of text that is to be added.
    """

    def __init__(self, kind: str, tokenizer: Any, config: dict[str, Any], add_bos: bool = False) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._config = {**config, _ADD_BOS: True} if add_bos else config
        self.kind = kind
        self._vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values()) + 1
        named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        end = next((name for name in (named.get("eos_token"), *KNOWN_ENDS) if name in self._vocabulary), None)
        if end is None:
            raise UserError(
                f"tokenizer.kind = {kind!r}: has no end-of-text token; name one as eos_token in the "
                "tokenizer_config.json beside tokenizer.json"
            )
        self.end_of_text = self._vocabulary[end]
        begin = self._vocabulary.get(named.get("bos_token", ""))
        if self._config.get(_ADD_BOS) and begin is None:
            raise UserError(
                f"tokenizer.add_bos = true: {kind!r} has no beginning of text (bos_token in tokenizer_config.json); "
                "leave it out"
            )
        self.beginning = [begin] if begin is not None and self._config.get(_ADD_BOS) else []
        self.begins_elsewhere = begin is not None and tokenizer.encode("a").ids[:1] == [begin]
        self.template_variables = {name: text for name, text in named.items() if text} | {"eos_token": end}

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickle forgets that special tokens in text are text.
        return LibraryTokenizer, (self.kind, self._tokenizer, self._config)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def chat_template(self) -> str:
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {one.get("name"): one.get("template") for one in template}.get("default")
        return template if isinstance(template, str) else ""

    @cached_property
    def _span_encoder(self) -> SpanEncoder:
        return SpanEncoder(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        form = {"tokenizer": _stated(json.loads(self._tokenizer.to_str())), "end_of_text": self.end_of_text}
        form |= {"beginning": self.beginning} if self.beginning else {}
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_spans(self, spans: Sequence[Span]) -> list[list[int]]:
        return self._span_encoder.encode(spans)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def token_bytes(self) -> list[bytes]:
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        spell = spell_byte_level if byte_level else spell_sentencepiece
        values = [b""] * self.vocab_size
        for piece, token in self._vocabulary.items():
            if token not in added:
                values[token] = spell(piece)
            elif not added[token].special and token != self.end_of_text:
                values[token] = piece.encode()
        return values

    def save(self, folder: Path) -> None:
        _write_json(folder / "spec.json", {"kind": self.kind})
        _write_json(folder / "tokenizer_config.json", self._config)
        self._tokenizer.save(str(folder / "tokenizer.json"))


class StreamDecoder:
    """Text as its tokens arrive, one whole character at a time.

    The parts together are what `decode` gives for all the ids, but for the space before the first word, which a
    SentencePiece tokenizer's `decode` leaves out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes; empty while one is half there."""
        return self._decoder.decode(_join(self._token_bytes, [token]))

    def flush(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that stayed half, else nothing."""
        return self._decoder.decode(b"", final=True)


def open_tokenizer(kind: str, add_bos: bool = False) -> Tokenizer:
    """Open a ready-made tokenizer.

    Arguments:
        kind: `bytes`, `tiktoken:<name>`, or `hf:<name or folder>`.
        add_bos: of one of Hugging Face: see `LibraryTokenizer`.

    Raises:
        UserError: there is none of that name, its files can't be had, or it lacks a token that it needs.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind.startswith("tiktoken:"):
        return TiktokenTokenizer(kind)
    if kind.startswith("hf:"):
        return LibraryTokenizer(kind, *read_tokenizer(kind), add_bos=add_bos)
    raise UserError(
        f"tokenizer.kind = {kind!r}: not a ready-made tokenizer; choose from bytes, tiktoken:<name>, hf:<name or "
        "folder>; bpe, which is trained on the text, is for preparing it"
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level byte-pair encoding: any text survives the way there and back, in few tokens.

    Arguments:
        texts: what to count pairs in; read once.
        vocab_size: tokens in all: 256 bytes, end of text, merges. Fewer come out where the texts have too few pairs.

    Returns:
        A tokenizer of kind `bpe`; the same one for the same texts.

    Raises:
        UserError: the vocabulary can't hold the bytes and end of text.
    """
    if vocab_size < 257:
        raise UserError(f"tokenizer.vocab_size = {vocab_size}: must be at least 257 (256 bytes and end of text)")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BPE_BORDERS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    return LibraryTokenizer("bpe", tokenizer, config)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Open what a tokenizer's `save` wrote.

    Arguments:
        folder: the folder given to `save`.

    Raises:
        UserError: a file is missing or broken, or tiktoken's own files can't be had.
    """
    try:
        kind = json.loads((folder / "spec.json").read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"{folder / 'spec.json'}: missing or broken; prepare the store anew") from None
    if kind == "bpe" or kind.startswith("hf:"):
        return LibraryTokenizer(kind, *read_folder(folder))
    return open_tokenizer(kind)


def _thread_count() -> int:
    # What bounds the threads of the `tokenizers` library bounds ours: a worker among many has one.
    asked = os.environ.get("RAYON_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


def _content(named: Any) -> str:
    # A token in tokenizer_config.json: its text, or a form whose `content` that is.
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else ""


def _join(token_bytes: list[bytes], ids: Iterable[int]) -> bytes:
    return b"".join(token_bytes[i] for i in ids if i < len(token_bytes))


def _stated(form: Any) -> Any:
    # Newer releases of the library write more keys, unset; without those, a fingerprint outlives an upgrade.
    if isinstance(form, dict):
        return {key: _stated(value) for key, value in form.items() if value is not None and value is not False}
    return [_stated(value) for value in form] if isinstance(form, list) else form


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
