"""What a device that has the whole model computes with, where that isn't float32: copies of the parameters, made anew
with each update.

The parameters that are trained stay float32: as FSDP2 has it where they are shared out (`MixedPrecisionPolicy`), whose
hooks around each block may cost more than the block does. They lie in one tensor, their copies in another, the
gradients in a third.

Shapes: N numbers of all parameters that are trained.
"""

import torch
from torch import nn

from meshwright.engines.torch.flat import Flat


class Copies:
    """The parameters of a module as it computes with them, and as they are stored.

    Arguments:
        module: its parameters become the copies; those that are trained lose their numbers.
        dtype: the type of those.
        decaying: the names of the parameters that weight decay pulls on.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, decaying: set[str]):
        self._copies = dict(module.named_parameters())
        trained = {name: parameter for name, parameter in self._copies.items() if parameter.requires_grad}
        self.flat = Flat(trained, decaying)
        """Where each of those lies that are trained."""
        device = next(iter(self._copies.values())).device
        for parameter in trained.values():  # a card that has room for the model may have none for it twice
            parameter.data = parameter.data.new_empty(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.values_N = torch.zeros(self.flat.size, dtype=torch.float32, device=device)
        """Those as they are stored."""
        self.used_N = torch.zeros(self.flat.size, dtype=dtype, device=device)
        """Those as the module computes with them."""
        values, used = self.flat.views(self.values_N), self.flat.views(self.used_N)
        self.stored: dict[str, nn.Parameter] = {}
        """By name, float32."""
        for name, parameter in self._copies.items():
            kept = values.get(name, parameter.data)
            self.stored[name] = nn.Parameter(kept, requires_grad=name in trained)
            parameter.data = used[name] if name in trained else parameter.data.to(dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what is stored."""
        self.used_N.copy_(self.values_N)
        for name, parameter in self.stored.items():
            if not parameter.requires_grad:
                self._copies[name].copy_(parameter)

    def taken(self) -> dict[str, torch.Tensor]:
        """The gradients that a backward pass left with the copies, which then have none."""
        found = {name: copy.grad for name, copy in self._copies.items() if copy.grad is not None}
        for name in found:
            self._copies[name].grad = None
        return found
