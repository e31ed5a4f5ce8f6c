"""The files of a tokenizer of the `tokenizers` library, from a folder or from the hub, and how they spell bytes."""

import json
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.hub_errors import refused


def read_tokenizer(kind: str) -> tuple[Any, dict[str, Any]]:
    """Read what `hf:<name or folder>` names.

    Arguments:
        kind: `hf:` and the path of a folder, or the name of a model on the hub.

    Returns:
        A `tokenizers.Tokenizer`, and what its `tokenizer_config.json` says, under `chat_template` what its
        `chat_template.jinja` says where there is such a file.

    Raises:
        UserError: there is none of that name, or a file is broken.
    """
    name = kind.removeprefix("hf:")
    if Path(name).is_dir():
        return read_folder(Path(name))
    mend = "give the path of a folder that holds tokenizer.json, or the name of a model on the hub"
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"tokenizer.kind = {kind!r}: no such folder; {mend}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        folder = Path(hf_hub_download(name, "tokenizer.json")).parent
        for optional in ("tokenizer_config.json", "chat_template.jinja"):
            try:
                hf_hub_download(name, optional)
            except EntryNotFoundError:
                continue
    except Exception as error:
        raise refused("tokenizer.kind", kind, error, mend) from None
    return read_folder(folder)


def read_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """As `read_tokenizer`, from a folder that holds `tokenizer.json`."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a tokenizer's folder must hold tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"{path}: not a tokenizer that the tokenizers library can read ({error})") from None
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{config_path}: not valid JSON ({error})") from None
    if template_path.is_file():
        try:
            config["chat_template"] = template_path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{template_path}: not UTF-8; save it as UTF-8") from None
    return tokenizer, config


def _byte_letters() -> dict[str, int]:
    # Byte-level vocabularies write a printable byte as itself and the others, in order, as the letters from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


def spell_byte_level(piece: str) -> bytes:
    """The bytes of a piece of a byte-level vocabulary."""
    return bytes(BYTE_LETTERS[letter] for letter in piece)


def spell_sentencepiece(piece: str) -> bytes:
    """The bytes of a piece of a SentencePiece vocabulary."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
