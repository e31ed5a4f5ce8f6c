"""Update rules and schedules: those of the JAX engine, on the part of each tensor that this process stores."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from meshwright.config import Run

_EPS = 1e-8


def make_schedule(run: Run) -> Callable[[int], float]:
    """Learning rate by update, counted from 0; see `meshwright.engines.jax.optimizer.make_schedule`.

    Arguments:
        run: `schedule`, `train.steps` and `optimizer.learning_rate` are read.
    """
    s, steps, peak = run.schedule, run.train.steps, run.optimizer.learning_rate
    final, after = s.final_share * peak, max(steps - s.warmup_steps - 1, 1)
    decay = s.decay_steps or max(steps // 5, 1)

    def main(count: int) -> float:
        if s.kind == "constant":
            return peak
        if s.kind == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * min(count, after) / after))
            return peak * ((1 - s.final_share) * share + s.final_share)
        begin, long = (0, after) if s.kind == "linear" else (max(after - decay, 0), decay)
        return peak + (final - peak) * min(max(count - begin, 0), long) / long

    def rate(count: int) -> float:
        if count >= s.warmup_steps:
            return main(count - s.warmup_steps)
        first, rises = peak / s.warmup_steps, max(s.warmup_steps - 1, 1)
        return first + (peak - first) * min(count, rises) / rises

    return rate


class Optimizer:
    """AdamW or Lion. Weight decay pulls on matrices and embeddings alone.

    Arguments:
        run: `[optimizer]` and `[schedule]` are read.
        parameters: the part of each parameter that this process stores, by name.
        is_matrix: which ones weight decay pulls on.
    """

    def __init__(self, run: Run, parameters: dict[str, torch.Tensor], is_matrix: dict[str, bool]):
        o = run.optimizer
        self._kind, self._beta1, self._beta2, self._decay = o.kind, o.beta1, o.beta2, o.weight_decay
        self.rate = make_schedule(run)
        """The learning rate of an update, counted from 0."""
        self.count = 0
        """Updates so far, those left out counted too."""
        self._names = {decays: [n for n in parameters if is_matrix[n] == decays] for decays in (True, False)}
        moments = ("mean", "square") if o.kind == "adamw" else ("mean",)
        self.state = {moment: {name: torch.zeros_like(p) for name, p in parameters.items()} for moment in moments}
        """The moments of each parameter's gradient, as stored."""
        self._counts = {name: torch.zeros((), device=p.device) for name, p in parameters.items()}

    def step(self, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
        """One update, in place.

        Arguments:
            parameters: the part of each that this process stores.
            gradients: theirs.
        """
        rate = self.rate(self.count)
        for decays, names in self._names.items():
            chosen = [name for name in names if parameters[name].numel()]
            if chosen:
                update = self._adamw if self._kind == "adamw" else self._lion
                update(chosen, parameters, gradients, rate, self._decay if decays else 0.0)
        self.count += 1

    def skip(self) -> None:
        """Leave one update out; the schedule goes on."""
        self.set_count(self.count + 1)

    def set_count(self, count: int) -> None:
        """Say how many updates there were."""
        self.count = count
        for number in self._counts.values():
            number.fill_(count)

    def _adamw(self, names: list[str], parameters: Any, gradients: Any, rate: float, decay: float) -> None:
        values, slopes, means, squares = (
            [kind[name] for name in names] for kind in (parameters, gradients, self.state["mean"], self.state["square"])
        )
        is_cuda = values[0].is_cuda
        adamw(
            values,
            slopes,
            means,
            squares,
            [],
            [self._counts[name] for name in names],
            fused=is_cuda,
            foreach=not is_cuda,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=rate,
            weight_decay=decay,
            eps=_EPS,
            maximize=False,
        )

    def _lion(self, names: list[str], parameters: Any, gradients: Any, rate: float, decay: float) -> None:
        values, slopes, means = ([kind[n] for n in names] for kind in (parameters, gradients, self.state["mean"]))
        signs = torch._foreach_lerp(means, slopes, 1 - self._beta1)
        torch._foreach_sign_(signs)
        torch._foreach_mul_(values, 1 - rate * decay)
        torch._foreach_add_(values, signs, alpha=-rate)
        torch._foreach_lerp_(means, slopes, 1 - self._beta2)
