"""Updates of parameters that lie in one tensor, which the module computes with copies of.

All that an update does to a number is done in one pass over memory: the gradient is scaled, the moments and the stored
parameter change, and the copy is made anew.

Shapes: N numbers of the parameters, those first that decay.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from meshwright.config import Run
from meshwright.engines.torch.copies import Copies
from meshwright.engines.torch.optimizer import EPS, Optimizer, moments


class FlatOptimizer(Optimizer):
    """See `Optimizer`; sums of gradients, over micro-batches or processes, are float32.

    Arguments:
        run: see there.
        copies: of the parameters that it updates.
        accumulate: how many micro-batches make a batch.
        group: the processes that have its other rows, and the same parameters; None: this one has all rows.
    """

    def __init__(self, run: Run, copies: Copies, accumulate: int, group: dist.ProcessGroup | None = None):
        self._moments = {moment: torch.zeros_like(copies.values_N) for moment in moments(run)}
        super().__init__(run, {moment: copies.flat.views(moment_N) for moment, moment_N in self._moments.items()})
        self._copies, self._group = copies, group
        self._change = _rule(run.optimizer.kind, copies.values_N.is_cuda)
        is_sum = accumulate > 1 or group is not None
        self._sums_N = torch.zeros_like(copies.values_N if is_sum else copies.used_N)
        self.gradients = copies.flat.views(self._sums_N)
        self._is_empty = True

    def collect(self) -> None:
        """See `Optimizer.collect`."""
        self.add(self._copies.taken())

    @torch.no_grad()
    def add(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add the gradients of a micro-batch, by name."""
        places, found = [self.gradients[name] for name in gradients], list(gradients.values())
        if not self._is_empty:
            torch._foreach_add_(places, [gradient.float() for gradient in found])
            return
        self._is_empty = False
        torch._foreach_copy_(places, found)
        if missing := [place for name, place in self.gradients.items() if name not in gradients]:
            torch._foreach_zero_(missing)

    def norm(self) -> torch.Tensor:
        """See `Optimizer.norm`."""
        if self._group is not None:
            dist.all_reduce(self._sums_N, group=self._group)
        return torch.linalg.vector_norm(self._sums_N, dtype=torch.float32)

    def _update(self, shrink: torch.Tensor | None) -> None:
        copies, device = self._copies, self._sums_N.device
        rate, number = self.rate(self.count), self.count + 1
        divisors = 1 - self._beta1**number, (1 - self._beta2**number) ** 0.5
        # On the device, as a compiled function is compiled for the numbers that it is given.
        numbers = torch.tensor([rate, *divisors], dtype=torch.float32).to(device, non_blocking=True)
        shrink = torch.ones((), device=device) if shrink is None else shrink
        whole = (copies.values_N, copies.used_N, self._sums_N, *self._moments.values())
        for half, decay in enumerate((self._decay, 0.0)):
            parts = [copies.flat.halves(one_N)[half] for one_N in whole]
            if len(parts[0]):
                self._change(*parts, shrink, numbers, decay, self._beta1, self._beta2)

    def _forget(self) -> None:
        self._is_empty = True


def _adamw(
    values_N: torch.Tensor,
    used_N: torch.Tensor,
    slopes_N: torch.Tensor,
    means_N: torch.Tensor,
    squares_N: torch.Tensor,
    shrink: torch.Tensor,
    numbers: torch.Tensor,
    decay: float,
    beta1: float,
    beta2: float,
) -> None:
    """Loshchilov and Hutter, 2019, in place."""
    rate, divisor, square_divisor = numbers.unbind()
    slopes_N = slopes_N.float() * shrink
    means_N.lerp_(slopes_N, 1 - beta1)
    squares_N.mul_(beta2).addcmul_(slopes_N, slopes_N, value=1 - beta2)
    values_N.mul_(1 - rate * decay)
    values_N.sub_(rate / divisor * means_N / (squares_N.sqrt() / square_divisor + EPS))
    used_N.copy_(values_N)


def _lion(
    values_N: torch.Tensor,
    used_N: torch.Tensor,
    slopes_N: torch.Tensor,
    means_N: torch.Tensor,
    shrink: torch.Tensor,
    numbers: torch.Tensor,
    decay: float,
    beta1: float,
    beta2: float,
) -> None:
    """Chen et al., 2023, in place."""
    rate = numbers[0]
    slopes_N = slopes_N.float() * shrink
    values_N.mul_(1 - rate * decay)
    values_N.sub_(rate * means_N.lerp(slopes_N, 1 - beta1).sign())
    means_N.lerp_(slopes_N, 1 - beta2)
    used_N.copy_(values_N)


@cache
def _rule(kind: str, is_cuda: bool) -> Callable[..., Any]:
    rule: Callable[..., Any] = _adamw if kind == "adamw" else _lion
    return torch.compile(rule, dynamic=False) if is_cuda else rule
