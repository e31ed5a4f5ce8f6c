"""Where tensors lie that make up one: whatever goes over all of them is then one kernel, not one for each.

Shapes: N numbers of all tensors, and what is between them.
"""

from collections.abc import Iterable, Mapping

import torch

_BORDER = 128  # numbers: each tensor starts at a multiple, where every library's kernels read at their full speed


class Flat:
    """A place for each of some tensors.

    Arguments:
        tensors: by name.
        first: the names of those that lie before all others.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], first: Iterable[str]):
        ahead = set(first)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.size, self.border = 0, 0
        for name in sorted(tensors, key=lambda name: name not in ahead):
            self._places[name] = self.size, tensors[name].shape
            self.size += -(-tensors[name].numel() // _BORDER) * _BORDER
            if name in ahead:
                self.border = self.size

    def views(self, flat_N: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor within the one of all."""
        return {
            name: flat_N[start : start + shape.numel()].view(shape) for name, (start, shape) in self._places.items()
        }

    def halves(self, flat_N: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that are first, and the others."""
        return [flat_N[: self.border], flat_N[self.border :]]
