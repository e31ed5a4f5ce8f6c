"""What one device computes with, where that isn't float32: copies of the parameters, made anew after each update.

The parameters that are trained stay float32, and so do the sums of their gradients: as FSDP2 has it on several devices
(`MixedPrecisionPolicy`), whose hooks around each block would cost more than the block does on one.
"""

import torch
from torch import nn


class Copies:
    """The parameters of a module as it computes with them, and as they are stored.

    Arguments:
        module: its parameters become the copies.
        dtype: the type of those.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self.stored: dict[str, nn.Parameter] = {}
        """By name, float32."""
        self._copies: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            self.stored[name] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(dtype)
            self._copies[name] = parameter

    @torch.no_grad()
    def refresh(self, *, trained_alone: bool) -> None:
        """Take over what is stored.

        Arguments:
            trained_alone: leave out what isn't trained.
        """
        names = [name for name, parameter in self.stored.items() if parameter.requires_grad or not trained_alone]
        torch._foreach_copy_([self._copies[name] for name in names], [self.stored[name] for name in names])

    def taken(self) -> dict[str, torch.Tensor]:
        """The gradients that a backward pass left with the copies, which then have none."""
        found = {name: copy.grad for name, copy in self._copies.items() if copy.grad is not None}
        for name in found:
            self._copies[name].grad = None
        return found

    @torch.no_grad()
    def collect(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add gradients of copies to those of the stored parameters."""
        exact = {name: torch.empty_like(self.stored[name]) for name in gradients}
        torch._foreach_copy_(list(exact.values()), list(gradients.values()))
        for name, gradient in exact.items():
            before = self.stored[name].grad
            self.stored[name].grad = gradient if before is None else before.add_(gradient)
