"""A checkpoint as Hugging Face keeps it: `config.json`, and tensors in one safetensors file or several."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.hub.tensor_file import Entry, Index, read_header, read_tensor
from meshwright.hub_errors import refused

CONFIG, SINGLE, LISTED = "config.json", "model.safetensors", "model.safetensors.index.json"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""What is fetched of a model on the hub: tensors, configs and the tokenizer."""


class Checkpoint:
    """Reads tensors, whole or in part, one at a time.

    Arguments:
        folder: that of the checkpoint.

    Raises:
        UserError: a file is missing or broken; it is named.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = _read_json(folder / CONFIG)
        """What `config.json` says."""
        self._entries = _entries(folder)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors calls it: `F32`, `BF16`, ..."""
        return self._entries[name].dtype

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """A tensor or a part of it, as float32; nothing else is read.

        Arguments:
            name: of the tensor.
            index: a slice of each axis, with steps of 1; axes left out are whole.

        Raises:
            UserError: its type can't be read.
        """
        return read_tensor(name, self._entries[name], index)


def open_checkpoint(kind: str) -> Checkpoint:
    """Open a checkpoint.

    Arguments:
        kind: `hf:` and the path of a folder, or the name of a model on the hub, which is fetched.

    Raises:
        UserError: there is none of that name, or a file is missing or broken.
    """
    return Checkpoint(_folder(kind) or Path(_fetched(kind, FILES)))


def read_config(kind: str, key: str = "model.init") -> dict[str, Any]:
    """What the `config.json` of a checkpoint says; of one on the hub nothing else is fetched.

    Arguments:
        kind: as for `open_checkpoint`.
        key: of the run file, that says so.

    Raises:
        UserError: there is no such checkpoint, or the file is broken.
    """
    return _read_json((_folder(kind, key) or Path(_fetched(kind, [CONFIG], key))) / CONFIG)


def read_optional(kind: str, name: str) -> dict[str, Any]:
    """What a JSON file of a checkpoint says that needn't be there; empty where it isn't.

    Arguments:
        kind: as for `open_checkpoint`.
        name: of the file.

    Raises:
        UserError: there is no such checkpoint, or the file is broken.
    """
    path = (_folder(kind) or Path(_fetched(kind, [CONFIG, name]))) / name
    return _read_json(path) if path.is_file() else {}


def _folder(kind: str, key: str = "model.init") -> Path | None:
    name = kind.removeprefix("hf:")
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(
            f"{key} = {kind!r}: no such folder; give one that holds {CONFIG}, or the name of a model on the hub"
        )
    return None


def _fetched(kind: str, patterns: list[str], key: str = "model.init") -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(kind.removeprefix("hf:"), allow_patterns=patterns)
    except Exception as error:
        mend = f"give a folder that holds {CONFIG}, or the name of a model on the hub"
        raise refused(key, kind, error, mend) from None


def _entries(folder: Path) -> dict[str, Entry]:
    if (folder / LISTED).is_file():
        listed = _read_json(folder / LISTED)
        try:
            shards: dict[str, str] = dict(listed["weight_map"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{folder / LISTED}: has no weight_map; fetch it again") from None
        for shard in sorted(set(shards.values())):
            if not (folder / shard).is_file():
                raise UserError(f"{folder / shard}: missing, but {LISTED} names it; fetch it")
        headers = {shard: read_header(folder / shard) for shard in sorted(set(shards.values()))}
        for name, shard in shards.items():
            if name not in headers[shard]:
                raise UserError(f"{folder / shard}: lacks {name}, which {LISTED} says it holds; fetch both again")
        return {name: headers[shard][name] for name, shard in shards.items()}
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise UserError(
            f"{pickled[0]}: pickled tensors aren't read, since opening them may run anything; save the model as "
            f"safetensors (save_pretrained of transformers does)"
        )
    raise UserError(
        f"{folder}: holds neither {SINGLE} nor {LISTED}; give the folder of a whole checkpoint, with its tensors as "
        "safetensors (save_pretrained of transformers writes them; pickled ones aren't read)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the folder of a whole checkpoint") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold an object; fetch it again")
    return values
