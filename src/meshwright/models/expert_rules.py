"""The tensors of a mixture of experts in a checkpoint: one a map and expert, or all experts of a layer in one."""

import numpy as np

from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, linear, transposed


def turned(x_EFD: np.ndarray) -> np.ndarray:
    """The kernels of all experts, the other way round."""
    return x_EFD.swapaxes(1, 2)


def expert_rules(
    spec: ModelSpec,
    theirs: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    whole: str = "model.layers.{layer}.mlp.experts",
) -> list[Rule]:
    """The rules of the experts of the stack `blocks`.

    Arguments:
        spec: with experts whose activation is `swiglu`.
        theirs: what the names of the experts' tensors begin with.
        names: of their maps: gate, up, down.
        whole: what the names begin with where all experts of a layer are in one tensor.
    """
    first, width = spec.dense_layers, spec.ffn_width
    parts = (slice(0, width), slice(width, 2 * width), None)
    rules = []
    for ours, name, part in zip(("gate", "up", "down"), names, parts, strict=True):
        together = f"{whole}.down_proj" if part is None else f"{whole}.gate_up_proj"
        fused = Rule(f"blocks.mlp.{ours}", together, turned, turned, part, axis=1, first_layer=first)
        one = f"{theirs}.{{expert}}.{name}.weight"
        rules.append(Rule(f"blocks.mlp.{ours}", one, transposed, transposed, first_layer=first, otherwise=fused))
    return rules


def gated_rules(ours: str, theirs: str, *, first_layer: int = 0) -> list[Rule]:
    """The rules of one feed-forward part with a gate.

    Arguments:
        ours, theirs: what the names begin with.
        first_layer: as in `Rule`.
    """
    pairs = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))
    rules = [rule for a, b in pairs for rule in linear(f"{ours}.{a}", f"{theirs}.{b}")]
    return [rule._replace(first_layer=first_layer) for rule in rules]
