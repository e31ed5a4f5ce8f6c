"""Writes a checkpoint that Hugging Face's libraries open: config, tensors in one file or several, tokenizer, card."""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.errors import UserError
from meshwright.hub.reader import CONFIG, LISTED, SINGLE
from meshwright.hub.tensor_file import DTYPES, write_file
from meshwright.hub.theirs import Shapes, Tensor, tensors_of
from meshwright.models.hf import hf_from_spec, weights
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import write

TYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Types that tensors can be written in, and what safetensors calls them."""


class Parameters(Protocol):
    """Where the parameters come from: an engine."""

    @property
    def shapes(self) -> Shapes:
        """Of each parameter by its dotted path."""

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""


def write_model(
    folder: Path,
    spec: ModelSpec,
    parameters: Parameters,
    *,
    dtype: str,
    shard_bytes: int,
    tokens: dict[str, Any],
    generation: dict[str, Any] | None = None,
) -> None:
    """Write `config.json`, `generation_config.json` and the tensors, one tensor at a time.

    Arguments:
        folder: an empty one.
        spec: the architecture, with its vocabulary.
        parameters: the model's.
        dtype: a key of `TYPES`.
        shard_bytes: the most bytes of tensors in a file; a larger tensor has a file of its own.
        tokens: ids of special tokens by their names in configs, such as `eos_token_id`.
        generation: what else `generation_config.json` is to say.

    Raises:
        UserError: the family can't represent the model; nothing is written then.
    """
    config, rules = hf_from_spec(spec), weights(spec)
    if unknown := sorted(parameters.shapes.keys() ^ {rule.ours for rule in rules}):
        raise UserError(
            f"model.family = {spec.family!r}: has no rule for {', '.join(unknown[:5])}; a model of one's own parts has "
            "no Hugging Face form"
        )
    tensors = tensors_of(rules, parameters.shapes)
    _write_json(folder / CONFIG, {**config, "dtype": dtype, **tokens})
    _write_json(folder / "generation_config.json", {**(generation or {"_from_model_config": True}), **tokens})
    size = DTYPES[TYPES[dtype]].itemsize
    shards = _shards(tensors, size, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        values = ((tensor.name, value_of(tensor, parameters)) for tensor in shard)
        write_file(folder / name, {tensor.name: tensor.shape for tensor in shard}, TYPES[dtype], values)
    if len(shards) > 1:
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(_size(tensor, size) for tensor in tensors)
        _write_json(folder / LISTED, {"metadata": {"total_size": total}, "weight_map": places})


def value_of(tensor: Tensor, parameters: Parameters) -> np.ndarray:
    """What a tensor of the checkpoint holds, float32."""
    return write(tensor.parts, [parameters.read(rule.ours, tensor.place) for rule in tensor.parts])


def _shards(tensors: list[Tensor], itemsize: int, shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor, itemsize)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _size(tensor: Tensor, itemsize: int) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * itemsize


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
