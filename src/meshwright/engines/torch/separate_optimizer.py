"""Updates of parameters that are stored where the module computes with them, each process its part of each."""

from typing import Any

import torch
from torch.optim.adamw import adamw

from meshwright.config import Run
from meshwright.engines.torch.collectives import add_up, reduced
from meshwright.engines.torch.optimizer import EPS, Optimizer, moments
from meshwright.engines.torch.plan import Placed, is_cut, own


class SeparateOptimizer(Optimizer):
    """See `Optimizer`.

    Arguments:
        run: see there.
        placed: whose parameters it updates.
    """

    def __init__(self, run: Run, placed: Placed):
        parts = {name: own(parameter) for name, parameter in placed.parameters.items()}
        super().__init__(run, {m: {name: torch.zeros_like(p) for name, p in parts.items()} for m in moments(run)})
        self._placed = placed
        self._change = self._adamw if run.optimizer.kind == "adamw" else self._lion
        self._names = {decays: [n for n in parts if placed.is_matrix[n] == decays] for decays in (True, False)}
        self._everywhere = [name for name, p in placed.parameters.items() if not is_cut(p)]
        self._counts = {name: torch.zeros((), device=p.device) for name, p in parts.items()}

    def collect(self) -> None:
        """See `Optimizer.collect`: PyTorch adds them up where they are."""

    def norm(self) -> torch.Tensor:
        """See `Optimizer.norm`."""
        mesh, everywhere = self._placed.mesh, set(self._everywhere)
        self.gradients = found = self._of_this_process()
        total = _squares([found[name] for name in found if name in everywhere], mesh.device)
        if mesh.tensor is not None:
            cut = _squares([found[name] for name in found if name not in everywhere], mesh.device)
            total = total + reduced(cut, mesh.tensor.group)
        return reduced(total, None if mesh.mesh is None else mesh.mesh.get_group("fsdp")).sqrt()

    def set_count(self, count: int) -> None:
        """See `Optimizer.set_count`."""
        super().set_count(count)
        for number in self._counts.values():
            number.fill_(count)

    def _of_this_process(self) -> dict[str, torch.Tensor]:
        """The gradient of each parameter, of which this process stores a part."""
        found = {
            name: torch.zeros_like(own(p)) if p.grad is None else own(p.grad)
            for name, p in self._placed.parameters.items()
        }
        mesh = self._placed.mesh
        if mesh.is_whole and mesh.batch_group is not None:  # elsewhere FSDP2 does it
            add_up(list(found.values()), mesh.batch_group)
        if mesh.tensor is not None:  # what isn't cut has a part of its gradient in each process
            add_up([found[name] for name in self._everywhere], mesh.tensor.group)
        return found

    def _update(self, shrink: torch.Tensor | None) -> None:
        rate = self.rate(self.count)
        values = {name: own(parameter) for name, parameter in self._placed.parameters.items()}
        if shrink is not None:
            torch._foreach_mul_(list(self.gradients.values()), shrink)
        for decays, names in self._names.items():
            if chosen := [name for name in names if values[name].numel()]:
                self._change(chosen, values, rate, self._decay if decays else 0.0)

    def _forget(self) -> None:
        self.gradients = {}
        for parameter in self._placed.parameters.values():
            parameter.grad = None

    def _adamw(self, names: list[str], parameters: dict[str, torch.Tensor], rate: float, decay: float) -> None:
        kinds: Any = (parameters, self.gradients, self.state["mean"], self.state["square"], self._counts)
        values, slopes, means, squares, counts = ([kind[name] for name in names] for kind in kinds)
        is_cuda = values[0].is_cuda
        adamw(
            values,
            slopes,
            means,
            squares,
            [],
            counts,
            fused=is_cuda,
            foreach=not is_cuda,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=rate,
            weight_decay=decay,
            eps=EPS,
            maximize=False,
        )

    def _lion(self, names: list[str], parameters: dict[str, torch.Tensor], rate: float, decay: float) -> None:
        kinds: Any = (parameters, self.gradients, self.state["mean"])
        values, slopes, means = ([kind[name] for name in names] for kind in kinds)
        signs = torch._foreach_lerp(means, slopes, 1 - self._beta1)
        torch._foreach_sign_(signs)
        torch._foreach_mul_(values, 1 - rate * decay)
        torch._foreach_add_(values, signs, alpha=-rate)
        torch._foreach_lerp_(means, slopes, 1 - self._beta2)


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
