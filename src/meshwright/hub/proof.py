"""Whether an exported checkpoint is the model that it was made from: the logits of both, on the same real tokens.

What is written is opened again by our own reader, into a fresh model. That finds whatever went wrong on the way to the
files, but not a mapping that is wrong in the same way there and back. The library `transformers` has its own idea of
the mapping and its own model, so that where it is installed that is found too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshwright.errors import UserError
from meshwright.hub.export import Parameters, value_of
from meshwright.hub.reader import Checkpoint
from meshwright.hub.reference import transformers_logits, transformers_version
from meshwright.hub.theirs import tensors_of
from meshwright.models.weights import Rule

TOLERANCE = 1e-4
"""The largest difference of logits in float32, up to logits of 10; of larger ones, the share `RELATIVE`."""
RELATIVE = 1e-5
ROUNDINGS = 4
"""How many times the difference that rounding the run's own parameters makes, an export in bfloat16 may differ."""

_MISSING = (
    "not compared with transformers, which isn't installed (pip install 'meshwright[torch]'): "
    "that names and orders are as it has them rests on Meshwright's own tests of the family"
)


def tolerance_of(logits_BTV: np.ndarray) -> float:
    """How far logits in float32 may lie apart, given some of them.

    Rounding goes by the size of what is rounded: in float32, two right implementations of a trained model of 135M
    parameters are more than 1e-4 apart on some processors.
    """
    return max(TOLERANCE, RELATIVE * float(np.abs(logits_BTV).max()))


Logits = Callable[[np.ndarray], np.ndarray]


@dataclass
class Proof:
    """The largest differences of logits that were found."""

    positions: int
    """Tokens at which logits were compared."""
    tolerance: float
    differences: dict[str, float] = field(default_factory=dict)
    """By what was compared."""
    missing: str = ""
    """What could not be compared, and why; empty: nothing."""

    def lines(self) -> list[str]:
        """For people."""
        over = f"over {self.positions} tokens; at most {self.tolerance:.1e}"
        found = [f"{what}: largest difference of logits {value:.1e} {over}" for what, value in self.differences.items()]
        return [*found, self.missing] if self.missing else found

    @property
    def failure(self) -> str:
        """What is beyond the tolerance; empty: nothing is."""
        beyond = [
            f"{what} differ by up to {value:.1e}, where {self.tolerance:.1e} is allowed"
            for what, value in self.differences.items()
            if not value <= self.tolerance  # so that a NaN is beyond it
        ]
        return "; ".join(beyond)


def prove(
    folder: Path, tokens_BT: np.ndarray, *, run_logits: Logits, rounded_logits: Logits | None, reread_logits: Logits
) -> Proof:
    """Compare an exported checkpoint with the run's own model.

    Arguments:
        folder: of the checkpoint.
        tokens_BT: real token ids.
        run_logits: of the run's model, `[B, T, V]` float32.
        rounded_logits: of it with its parameters rounded to the type that was written; None: that is float32.
        reread_logits: of a fresh model, made of what was written.

    Raises:
        UserError: `transformers` is installed and can't open the checkpoint.
    """
    ours = run_logits(tokens_BT)
    tolerance = tolerance_of(ours)
    if rounded_logits is not None:
        tolerance += ROUNDINGS * difference(rounded_logits(tokens_BT), ours)
    proof = Proof(tokens_BT.size, tolerance)
    reread = reread_logits(tokens_BT)
    proof.differences["the run's model and what was written, read again"] = difference(ours, reread)
    if not (version := transformers_version()):
        proof.missing = _MISSING
        return proof
    theirs = transformers_logits(folder, tokens_BT)
    proof.differences[f"the run's model and transformers {version}"] = difference(ours, theirs)
    return proof


def compare_tensors(checkpoint: Checkpoint, parameters: Parameters, rules: list[Rule], dtype: str) -> int:
    """Read every tensor again from disk, and compare it with the run's parameters.

    Logits can't show all of them: of experts, just those that were chosen.

    Arguments:
        checkpoint: what was written.
        parameters: the run's.
        rules: of its family.
        dtype: that it was written in.

    Returns:
        How many there are.

    Raises:
        UserError: one isn't what was to be written, or they aren't those that were to be there.
    """
    tensors = tensors_of(rules, parameters.shapes)
    if set(checkpoint.names) != {tensor.name for tensor in tensors}:
        raise UserError(f"{checkpoint.folder}: holds other tensors than were written")
    rounding = 0.0 if dtype == "float32" else 2.0**-8
    for tensor in tensors:
        written, meant = checkpoint.read(tensor.name), value_of(tensor, parameters)
        if written.shape != meant.shape or not (np.abs(written - meant) <= rounding * np.abs(meant)).all():
            raise UserError(f"{checkpoint.folder}: {tensor.name} isn't what was written, or isn't finite")
    return len(tensors)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest of two models' logits.

    Raises:
        UserError: they aren't of one shape.
    """
    if a.shape != b.shape:
        raise UserError(f"logits of shape {a.shape} and {b.shape}: the vocabularies differ")
    return float(np.abs(a.astype(np.float64) - b).max())
