"""Where the first parameters come from: a seed, or a Hugging Face checkpoint; one tensor, or its part, at a time."""

import math
import zlib
from typing import Protocol

import numpy as np

from meshwright.engines.torch.names import Names, read_slice, write_tensor
from meshwright.errors import UserError
from meshwright.hub import any_model
from meshwright.hub.reader import Checkpoint
from meshwright.hub.tensor_file import Index
from meshwright.hub.theirs import tensors_of
from meshwright.models.hf import family_of, tensor_name, unread_tensors, weights
from meshwright.models.spec import ANY, ModelSpec
from meshwright.models.weights import present

_STD = 0.02
_OUTWARD = ("out", "down")
_NAMED = 5


class Weights(Protocol):
    """Gives the tensors of a module."""

    def tensor(self, name: str, index: Index) -> np.ndarray:
        """A tensor or a part of it, float32.

        Arguments:
            name: as the module has it.
            index: a slice of each axis.
        """


class RandomWeights(Weights):
    """The distribution that the JAX engine starts from, though not its numbers; the same on every mesh.

    Maps and tables are normal with standard deviation 0.02, those that add to the residual stream with that over the
    root of twice the number of layers (GPT-2); biases are 0, and norms 1.

    Arguments:
        names: of the module.
        spec: the architecture.
        seed: the run's.
    """

    def __init__(self, names: Names, spec: ModelSpec, seed: int):
        self._names, self._seed = names, seed
        self._outward = _STD / math.sqrt(2 * spec.layers)

    def tensor(self, name: str, index: Index) -> np.ndarray:
        """See `Weights.tensor`."""
        return write_tensor(self._names, name, self._slice)[index]

    def _slice(self, path: str, place: tuple[int, ...]) -> np.ndarray:
        shape, parts = self._names.ours[path][len(place) :], path.split(".")
        if parts[-1] == "scale":
            return np.ones(shape, np.float32)
        if parts[-1].endswith("bias"):
            return np.zeros(shape, np.float32)
        outward = any(part in _OUTWARD for part in parts[-2:])
        random = np.random.default_rng([self._seed, zlib.crc32(path.encode()), *place])
        return random.standard_normal(shape, np.float32) * np.float32(self._outward if outward else _STD)


class CheckpointWeights(Weights):
    """The tensors of a checkpoint; of one that the module holds as it is there, just the part asked for is read.

    Arguments:
        checkpoint: an open one.
        names: of the module.
        spec: the architecture.

    Raises:
        UserError: a tensor is missing, of a wrong shape, or isn't used.
    """

    def __init__(self, checkpoint: Checkpoint, names: Names, spec: ModelSpec):
        self._checkpoint, self._names = checkpoint, names
        self._family = any_model.family(spec) if spec.family == ANY else family_of(checkpoint.config)
        self._present = set(checkpoint.names)
        rules = present(weights(spec), lambda name: self._there(name) is not None)
        self._rules = {rule.ours: rule for rule in rules}
        self._same = {rule.theirs for rule in rules} & {rule.theirs for rule in names.rules}
        self._check(rules, spec)

    def tensor(self, name: str, index: Index) -> np.ndarray:
        """See `Weights.tensor`."""
        if self._names.tensors[name].parts[0].theirs in self._same:
            return self._checkpoint.read(self._there(name) or name, index)
        return write_tensor(self._names, name, self._slice)[index]

    def _slice(self, path: str, place: tuple[int, ...]) -> np.ndarray:
        read = self._checkpoint.read
        return read_slice(
            self._rules[path], self._names.ours[path], place, lambda name: read(self._there(name) or name)
        )

    def _there(self, name: str) -> str | None:
        return tensor_name(name, self._present, self._family)

    def _check(self, rules: list, spec: ModelSpec) -> None:
        folder = self._checkpoint.folder
        tensors = tensors_of(rules, self._names.ours)
        if missing := [tensor.name for tensor in tensors if self._there(tensor.name) is None]:
            another = "; or transformers makes it of others while it reads" if spec.family == ANY else ""
            raise UserError(f"{folder}: lacks {_several(missing)}; give a whole checkpoint{another}")
        if spec.family == ANY:
            wanted = {self._there(tensor.name) for tensor in tensors}
            unread = any_model.unread(spec, sorted(self._present - wanted))
        else:
            unread = unread_tensors(self._present, rules, self._family, spec)
        if unread:
            raise UserError(
                f"{folder}: holds {_several(unread)}, which the family {spec.family} has no use for; "
                "the model would not be the one that was saved"
            )
        for tensor in tensors:
            name = self._there(tensor.name) or tensor.name
            if (found := self._checkpoint.shape(name)) != tensor.shape:
                raise UserError(
                    f"{folder}: {name} is of shape {found}, where its config.json asks for {tensor.shape}; give the "
                    "config.json that was saved with it"
                )


def _several(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
