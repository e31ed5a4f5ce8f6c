"""What updates have in common; the rules and schedules are those of the JAX engine."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from meshwright.config import Run

EPS = 1e-8
"""Added to AdamW's divisor."""


def moments(run: Run) -> tuple[str, ...]:
    """Which averages of the gradient the optimizer of a run keeps."""
    return ("mean", "square") if run.optimizer.kind == "adamw" else ("mean",)


def make_schedule(run: Run) -> Callable[[int], float]:
    """Learning rate by update, counted from 0; see `meshwright.engines.jax.optimizer.make_schedule`.

    Arguments:
        run: `schedule`, `train.steps` and `optimizer.learning_rate` are read.
    """
    s, steps, peak = run.schedule, run.train.steps, run.optimizer.learning_rate
    final, after = s.final_share * peak, max(steps - s.warmup_steps - 1, 1)
    decay = min(s.decay_steps or max(steps // 5, 1), after)

    def main(count: int) -> float:
        if s.kind == "constant":
            return peak
        if s.kind == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * min(count, after) / after))
            return peak * ((1 - s.final_share) * share + s.final_share)
        begin, long = (0, after) if s.kind == "linear" else (after - decay, decay)
        return peak + (final - peak) * min(max(count - begin, 0), long) / long

    def rate(count: int) -> float:
        if count >= s.warmup_steps:
            return main(count - s.warmup_steps)
        first, rises = peak / s.warmup_steps, max(s.warmup_steps - 1, 1)
        return first + (peak - first) * min(count, rises) / rises

    return rate


class Optimizer(ABC):
    """AdamW or Lion, with the gradient of a batch. Weight decay pulls on matrices and embeddings alone.

    Arguments:
        run: `[optimizer]` and `[schedule]` are read.
        state: by moment, and by name the part of each parameter's that this process stores.
    """

    def __init__(self, run: Run, state: dict[str, dict[str, torch.Tensor]]):
        o = run.optimizer
        self._beta1, self._beta2, self._decay = o.beta1, o.beta2, o.weight_decay
        self.state = state
        """See above."""
        self.rate = make_schedule(run)
        """The learning rate of an update, counted from 0."""
        self.count = 0
        """Updates so far, those left out counted too."""
        self.gradients: dict[str, torch.Tensor] = {}
        """Of the batch, by name the part of each that this process stores; whole once `norm` has been called."""

    @abstractmethod
    def collect(self) -> None:
        """Take the gradients that a backward pass left; to be called after each."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Of the gradient of the whole model, each number of it counted once; to be called once a batch, as what other
        processes have of the gradient is added here."""

    def step(self, shrink: torch.Tensor | None) -> None:
        """One update, in place, after which there is no gradient.

        Arguments:
            shrink: what the gradient is multiplied by; None: nothing.
        """
        self._update(shrink)
        self.count += 1
        self._forget()

    def skip(self) -> None:
        """Leave one update out; the schedule goes on."""
        self.set_count(self.count + 1)
        self._forget()

    def set_count(self, count: int) -> None:
        """Say how many updates there were."""
        self.count = count

    @abstractmethod
    def _update(self, shrink: torch.Tensor | None) -> None: ...

    @abstractmethod
    def _forget(self) -> None: ...
