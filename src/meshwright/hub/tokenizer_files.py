"""A tokenizer as files that Hugging Face's libraries open, giving the same ids."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.data.tokenizer import END_OF_TEXT, LibraryTokenizer, TiktokenTokenizer, Tokenizer
from meshwright.data.tokenizer_files import BYTE_LETTERS, read_tokenizer
from meshwright.errors import UserError

HARD_TEXTS = (
    "def f(x: int) -> int:\n\treturn  x**2  # squared\r\n\n    if x != 0x1F: pass\n",
    "naïve café, ΑΒΓ αβγ, Привет, שלום, العربية, हिन्दी, ไทย, e\u0301\u0302 Å Å",
    "你好，世界。こんにちは。안녕하세요 𠮷野家",  # noqa: RUF001
    "👍🏽 👨‍👩‍👧‍👦 🇨🇭 🏳️‍🌈 ❤️",
    "\x00\x01\x02\x1b[31m\x7f\u200b\u200d\ufeff\u2028\u00a0\ufffd",
    "   leading, trailing   \n\n\n  \t 12345678901 3.14e-10 don't I'LL we've",
    "",
)
"""Code, accents, scripts, emoji, control characters, spaces, numbers: where tokenizers come apart."""

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja"),
)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context_length: int) -> None:
    """Write `tokenizer.json` and what belongs to it.

    One that came as files goes as it came, if those files are still where the run found them; else as the run kept it.
    One that was trained here, `bytes` and tiktoken's are written as a `PreTrainedTokenizerFast`.

    Arguments:
        folder: an existing one.
        tokenizer: the run's.
        context_length: the model's.

    Raises:
        UserError: no `tokenizer.json` gives the same ids.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        origin = _origin(tokenizer)
        if origin is None:
            tokenizer.save(folder)
            (folder / "spec.json").unlink()
        else:
            for path in (origin / name for name in _FILES):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
    else:
        _fast(tokenizer).save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.template_variables["eos_token"],
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
    _check(folder, tokenizer)


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens that configs name, by their keys there."""
    ids = {"eos_token_id": tokenizer.end_of_text}
    for name in ("bos_token", "pad_token"):
        text = tokenizer.template_variables.get(name, "")
        if text in tokenizer.special_tokens:
            ids[f"{name}_id"] = tokenizer.special_tokens[text]
    return ids


def _origin(tokenizer: Tokenizer) -> Path | None:
    folder = Path(tokenizer.kind.removeprefix("hf:"))
    if not tokenizer.kind.startswith("hf:") or not (folder / "tokenizer.json").is_file():
        return None
    try:
        there = LibraryTokenizer(tokenizer.kind, *read_tokenizer(tokenizer.kind), add_bos=bool(tokenizer.beginning))
    except UserError:
        return None
    return folder if there.fingerprint == tokenizer.fingerprint else None


def _fast(tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, TiktokenTokenizer):
        return _from_tiktoken(tokenizer)
    letters = {byte: letter for letter, byte in BYTE_LETTERS.items()}
    return _byte_level({letters[byte]: byte for byte in range(256)}, [], "", {END_OF_TEXT: tokenizer.end_of_text})


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], borders: str, special: dict[str, int]
) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    fast = Tokenizer(models.BPE(vocab={**vocabulary, **special}, merges=merges, ignore_merges=bool(merges)))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [pre_tokenizers.Split(Regex(borders), "isolated")] if borders else []
    fast.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_alone])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return fast


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> Any:
    import tiktoken

    borders = tiktoken.get_encoding(tokenizer.kind.removeprefix("tiktoken:"))._pat_str
    letters = {byte: letter for letter, byte in BYTE_LETTERS.items()}
    special = set(tokenizer.special_tokens.values())
    ranks = {piece: i for i, piece in enumerate(tokenizer.token_bytes()) if piece and i not in special}

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    pairs = [_last_two(piece, ranks) for piece in ranks if len(piece) > 1]
    merges = [(spelled(left), spelled(right)) for left, right in pairs]
    vocabulary = {spelled(piece): rank for piece, rank in ranks.items()}
    return _byte_level(vocabulary, merges, borders, dict(tokenizer.special_tokens))


def _last_two(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes a token: what is left when all merges before it are done."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _check(folder: Path, tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.no_truncation()
    for text in HARD_TEXTS:
        ours, theirs = list(tokenizer.encode(text)), fast.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise UserError(
                f"tokenizer.kind = {tokenizer.kind!r}: has no exact Hugging Face form: {text[:20]!r} becomes "
                f"{theirs[:8]} there, {ours[:8]} here"
            )
