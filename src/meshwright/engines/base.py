"""What an engine is. An engine owns parameters, optimizer state and devices; the trainer owns time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.data.examples import Batch
from meshwright.errors import UserError
from meshwright.hub.export import Parameters
from meshwright.hub.reader import Checkpoint

RESTORED = "restored"
"""What `model.init` is for an engine that is put where a checkpoint left it before it does anything else."""


class Sampling(NamedTuple):
    """How the next token is chosen from its scores.

    `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 leave all tokens in. The same `seed` gives the same
    text.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """See that the numbers make sense.

        Raises:
            UserError: one doesn't.
        """
        for name, good, rule in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("seed", 0 <= self.seed < 2**31, "a whole number from 0 to 2147483647"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0, and 1 (all tokens) at most"),
        ):
            if not good:
                raise UserError(f"{name} = {getattr(self, name)!r}: must be {rule}")


class Engine(Protocol):
    """Trains, evaluates, saves and generates; knows nothing of logs, cadences or files other than its own."""

    rows: np.ndarray
    """Which rows of each global batch this process must supply, in order."""
    parameters: int
    """How many parameters the model has."""
    active_parameters: int
    """How many of them take part in the computation of one token: fewer where there are experts."""
    trained_parameters: int
    """How many are trained: all of them, or those of adapters, which `parameters` doesn't count."""
    token_seconds: float | None
    """Seconds in which the devices could train on a token if they did nothing but its products; None: not known."""
    description: str
    """The devices and types in a few words, for people."""
    identity: dict[str, str]
    """What else than the run file must stay the same for a checkpoint to be gone on from."""

    def train_step(self, batch: Batch, stop: int = 0) -> dict[str, Any]:
        """Train on one global batch; returns at once.

        Arguments:
            batch: this process's rows, `[B, T]`.
            stop: a signal that asks this process to stop; 0: none.

        Returns:
            `loss`, `grad_norm`, `tokens` (those that counted), `learning_rate` where it is known, of pairs
            `reward_margin` and `reward_accuracy`, and a researcher's own metrics, each still on its way:
            `float(value)` waits for it. Where several processes train together also `stop`, the largest that any of
            them gave, so that all stop at the same step.
        """
        ...

    def eval_step(self, batch: Batch) -> tuple[Any, Any]:
        """The sum of the token losses (nats) of a batch and the count of the tokens in it, each on its way; of pairs
        the sum of their losses and the count of pairs."""
        ...

    def trace(self, folder: Path) -> AbstractContextManager:
        """What the devices and the host do inside is written into a folder, as a trace."""
        ...

    def is_finite(self) -> bool:
        """Whether every parameter is a finite number; waits for the last step."""
        ...

    def save(self, folder: Path) -> Callable[[], None]:
        """Start to write the whole state into an empty folder; training may go on at once.

        Returns:
            A function that waits until every byte is on disk, and raises what went wrong.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Take up the state that `save` wrote.

        Raises:
            UserError: the folder holds the state of another model or optimizer.
            Exception: it is damaged; the engine's state is as it was.
        """
        ...

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """Continue token ids, a batch at a time.

        Arguments:
            prompts: token ids, at least one a prompt; lengths may differ.
            max_tokens: the most tokens to add to each.
            stop: the token that ends a text.
            sampling: how to choose.

        Yields:
            The next token of each prompt; None for one that has ended.
        """
        ...

    def on_host(self) -> Parameters:
        """The parameters as an evaluation uses them, gathered one slice at a time; needs all devices in one process.

        Adapters are added to the parameters that they belong to.
        """
        ...

    def adapters_on_host(self) -> Parameters:
        """The same with the adapters as parameters of their own."""
        ...

    def logits(self, tokens_BT: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Scores of the token after each, computed in float32.

        Arguments:
            tokens_BT: token ids.
            dtype: what the parameters are rounded to before.

        Returns:
            `[B, T, V]`, float32.
        """
        ...

    def logits_of(self, checkpoint: Checkpoint, tokens_BT: np.ndarray) -> np.ndarray:
        """The same of a fresh model on one device, made of a Hugging Face checkpoint.

        Raises:
            UserError: the checkpoint isn't one of a whole model.
        """
        ...
