"""Which tensors a model has in a checkpoint of its family."""

from typing import NamedTuple

import numpy as np

from meshwright.models.weights import Rule, shared_tensors

Shapes = dict[str, tuple[int, ...]]


class Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int, ...]
    """Which slice of our parameters it holds: the places along their stacked axes."""
    parts: list[Rule]
    """The rules that share it, in the order of their parts."""


def tensors_of(rules: list[Rule], shapes: Shapes) -> list[Tensor]:
    """Every tensor of a checkpoint, those of a layer together.

    Arguments:
        rules: of the family.
        shapes: of our parameters by dotted path, without what pads the vocabulary.
    """
    found = []
    for parts in shared_tensors(rules):
        shape = _shape(parts, shapes)
        for index, name in parts[0].tensors(shapes[parts[0].ours]):
            found.append(Tensor(name, shape, index, parts))
    before = [tensor for tensor in found[: _first_stacked(found)] if not tensor.place]
    layers = sorted((tensor for tensor in found if tensor.place), key=_layer)
    after = [tensor for tensor in found[_first_stacked(found) :] if not tensor.place]
    return [*before, *layers, *after]


def _shape(parts: list[Rule], shapes: Shapes) -> tuple[int, ...]:
    # Of arrays without memory of their own, since all experts of a layer may be one tensor.
    slices = [np.broadcast_to(np.float32(0), shapes[rule.ours][rule.stacked :]) for rule in parts]
    seen = [rule.to_theirs(x).shape for rule, x in zip(parts, slices, strict=True)]
    whole = list(seen[0])
    if len(parts) > 1:
        whole[parts[0].axis] = sum(shape[parts[0].axis] for shape in seen)
    return (whole[0] * whole[1], *whole[2:]) if parts[0].heads else tuple(whole)


def _first_stacked(tensors: list[Tensor]) -> int:
    return next((number for number, tensor in enumerate(tensors) if tensor.place), len(tensors))


def _layer(tensor: Tensor) -> int:
    return tensor.place[0] + tensor.parts[0].first_layer
