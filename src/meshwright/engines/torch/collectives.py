"""What the processes of a tensor group send each other, with its gradients.

Between the maps that are cut, each process holds its share of time (sequence parallelism: Korthikanti et al., 2022), or
all of it. Either way the gradient of what isn't cut is in each process its part of a sum.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# From 2.13 on, PyTorch calls them otherwise.
_GATHER = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_SCATTER = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


class TensorGroup:
    """The processes that share heads, feed-forward width and vocabulary.

    Arguments:
        group: theirs.
        cuts_time: whether time is cut between the maps.
    """

    def __init__(self, group: dist.ProcessGroup, *, cuts_time: bool = True):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.cuts_time = cuts_time
        """Whether time is cut between the maps; while text is generated it isn't."""

    def enter(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """All of time, where this process has its share; what comes back from all processes is summed."""
        return _Gather.apply(x_BTD, self.group) if self.cuts_time else x_BTD

    def leave(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The sum over processes, of which each keeps its share of time."""
        return (_Scatter if self.cuts_time else _Sum).apply(x_BTD, self.group)

    def share_of_time(self, x_BT: torch.Tensor) -> torch.Tensor:
        """This process's part of something that all have."""
        return x_BT.chunk(self.size, dim=1)[self.rank] if self.cuts_time else x_BT


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _scattered(gradients[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _gathered(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduced(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return reduced(gradients[0], ctx.group), None


def _gathered(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return funcol.wait_tensor(_GATHER(x_BTD.contiguous(), 1, group))


def _scattered(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return funcol.wait_tensor(_SCATTER(x_BTD.contiguous(), "sum", 1, group))


def reduced(x: torch.Tensor, group: dist.ProcessGroup | None, how: str = "sum") -> torch.Tensor:
    """The sum (or `max`) over the processes of a group, without a gradient; None: of this one alone."""
    return x if group is None else funcol.wait_tensor(funcol.all_reduce(x.contiguous(), how, group))


@torch.no_grad()
def add_up(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the processes of a group; all of them are sent as one.

    Arguments:
        tensors: of one type; at least one.
        group: theirs.
    """
    sent = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(sent, group=group)
    parts = sent.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
