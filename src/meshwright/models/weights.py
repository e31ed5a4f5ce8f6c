"""How the tensors of a checkpoint and the decoder's stacked parameters are made of each other: one rule a tensor.

A family's `weights(spec)` is a list of rules. Imports no framework.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

Map = Callable[[np.ndarray], np.ndarray]


def same(x: np.ndarray) -> np.ndarray:
    """The tensor as it is."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """A kernel, `[fan_in, fan_out]` or the other way round: PyTorch's linear maps hold the latter."""
    return x.T


def one_more(x: np.ndarray) -> np.ndarray:
    """The scale of a norm that is kept as its distance from 1."""
    return x + np.float32(1)


def one_less(x: np.ndarray) -> np.ndarray:
    """Undoes `one_more`."""
    return x - np.float32(1)


class Rule(NamedTuple):
    """One parameter of ours, and the tensors of theirs that its slices are made of.

    The maps are given float32 and keep it; whoever writes another type rounds last.
    """

    ours: str
    """Dotted path of a parameter, such as `blocks.attention.query.kernel`."""
    theirs: str
    """Name of a tensor, with `{layer}` and `{expert}` where ours is stacked; the layers are then its first axis."""
    to_ours: Map = same
    """Makes a slice of ours of a tensor of theirs (of its part, where there is one)."""
    to_theirs: Map = same
    """Undoes it."""
    part: slice | None = None
    """Where several of our parameters share a tensor: which places of an axis are this one's."""
    axis: int = -1
    """That axis."""
    heads: int = 0
    """Into how many equal ones the tensor's first axis is cut beforehand, so that it becomes two; 0: it isn't."""
    first_layer: int = 0
    """The number that they give to the first layer of our stack."""
    otherwise: "Rule | None" = None
    """By which to read where that tensor isn't there, as where experts are kept in one; not written so."""

    @property
    def stacked(self) -> int:
        """How many leading axes of ours go by layer and expert; the rest is one slice."""
        return self.theirs.count("{")

    def name(self, index: tuple[int, ...] = ()) -> str:
        """Name of the tensor that a slice of ours is made of.

        Arguments:
            index: place along each stacked axis.
        """
        numbers = dict(zip(("layer", "expert"), index, strict=False))
        return self.theirs.format(**{k: n + self.first_layer if k == "layer" else n for k, n in numbers.items()})

    def tensors(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Place and name of every slice of ours, in order.

        Arguments:
            shape: of the whole parameter.
        """
        for index in product(*(range(size) for size in shape[: self.stacked])):
            yield index, self.name(index)

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """A slice of ours.

        Arguments:
            tensor: theirs, whole.
        """
        seen = tensor.reshape(self.heads, -1, *tensor.shape[1:]) if self.heads else tensor
        if self.part is not None:
            seen = seen[(slice(None),) * (self.axis % seen.ndim) + (self.part,)]
        return self.to_ours(seen)


def write(rules: list[Rule], slices: list[np.ndarray]) -> np.ndarray:
    """A tensor of theirs.

    Arguments:
        rules: all that share it, in the order of their parts; from `shared_tensors`.
        slices: of our parameters, one a rule.
    """
    parts = [rule.to_theirs(x) for rule, x in zip(rules, slices, strict=True)]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=rules[0].axis)
    return whole.reshape(-1, *whole.shape[2:]) if rules[0].heads else whole


def present(rules: list[Rule], is_there: Callable[[str], bool]) -> list[Rule]:
    """The rules to read a checkpoint by.

    Arguments:
        rules: of a family.
        is_there: whether the checkpoint has a tensor of a name.
    """

    def choose(rule: Rule) -> Rule:
        first = rule.name((0,) * rule.stacked)
        return rule if rule.otherwise is None or is_there(first) else choose(rule.otherwise)

    return [choose(rule) for rule in rules]


def linear(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    """The rules of one of PyTorch's linear maps.

    Arguments:
        ours, theirs: without the last `.kernel`, `.weight` or `.bias`.
        bias: whether it has one.
    """
    kernel = Rule(f"{ours}.kernel", f"{theirs}.weight", transposed, transposed)
    return [kernel, Rule(f"{ours}.bias", f"{theirs}.bias")] if bias else [kernel]


def shared_tensors(rules: list[Rule]) -> list[list[Rule]]:
    """The rules of each tensor, or of each stack of tensors, in the order of their parts.

    Arguments:
        rules: of a family.
    """
    found: dict[tuple[str, int], list[Rule]] = {}
    for rule in rules:
        found.setdefault((rule.theirs, rule.first_layer), []).append(rule)
    return [sorted(parts, key=lambda rule: rule.part.start if rule.part else 0) for parts in found.values()]
