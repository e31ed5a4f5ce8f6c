"""How the tensors of a module of `transformers` and the parameters of our decoder are made of each other.

A module may hold other tensors than its checkpoints do: all experts of a layer in one, where a checkpoint has one an
expert. The rules of `meshwright.models.weights` tell of both.
"""

from collections.abc import Callable

import numpy as np

from meshwright.hub.theirs import Shapes, Tensor, tensors_of
from meshwright.models.hf import weights
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, present, write

Read = Callable[[str], np.ndarray]


class Names:
    """The tensors of a module, by name, and the slices of our parameters that each is made of.

    Arguments:
        spec: the architecture.
        shapes: of the module's tensors.
    """

    def __init__(self, spec: ModelSpec, shapes: Shapes):
        self.theirs = shapes
        """Shapes of the module's tensors."""
        self.rules = present(weights(spec), lambda name: name in shapes)
        """Those by which the module's tensors are read and written."""
        self._by_path = {rule.ours: rule for rule in self.rules}
        self.ours = {path: self._shape(rule) for path, rule in self._by_path.items()}
        """Shapes of our parameters by dotted path."""
        self.tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in tensors_of(self.rules, self.ours)}
        """What each is made of."""

    def read(self, path: str, index: tuple[int, ...], tensor: Read) -> np.ndarray:
        """A slice of one of our parameters.

        Arguments:
            path: of the parameter.
            index: places along its first axes.
            tensor: reads one of the module's tensors, float32.
        """
        return read_slice(self._by_path[path], self.ours[path], index, tensor)

    def _shape(self, rule: Rule) -> tuple[int, ...]:
        name, sizes = rule.name((0,) * rule.stacked), []
        # Where stacks follow one another, as layers without experts and those with, names go on from one to the next.
        next_stack = [r.first_layer for r in self.rules if r.theirs == rule.theirs and r.first_layer > rule.first_layer]
        for axis in range(rule.stacked):
            places = [0] * rule.stacked
            most = min(next_stack) - rule.first_layer if next_stack and axis == 0 else len(self.theirs)
            while places[axis] < most and rule.name(tuple(places)) in self.theirs:
                places[axis] += 1
            sizes.append(places[axis])
        return (*sizes, *rule.read(np.broadcast_to(np.float32(0), self.theirs[name])).shape)


def read_slice(rule: Rule, shape: tuple[int, ...], index: tuple[int, ...], tensor: Read) -> np.ndarray:
    """A slice of one of our parameters, however many of its axes go by layer and expert in what is read.

    Arguments:
        rule: of the parameter.
        shape: of it, whole.
        index: places along its first axes.
        tensor: reads a tensor by the rule's name of it.
    """
    if len(index) < rule.stacked:
        return np.stack([read_slice(rule, shape, (*index, place), tensor) for place in range(shape[len(index)])])
    return rule.read(tensor(rule.name(index[: rule.stacked])))[index[rule.stacked :]]


def write_tensor(names: Names, name: str, ours: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """One of the module's tensors.

    Arguments:
        names: of the module.
        name: the tensor's.
        ours: gives a slice of one of our parameters.
    """
    tensor = names.tensors[name]
    return write(tensor.parts, [ours(rule.ours, tensor.place) for rule in tensor.parts])
