"""Which linear maps get low-rank adapters (LoRA), by the names that checkpoints have for them. Imports no framework."""

from collections.abc import Container
from fnmatch import fnmatchcase
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.models.hf import weights
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, same, shared_tensors

ALL = "all-linear"
"""The target that stands for every linear map of the layers."""


class Adapter(NamedTuple):
    """A low-rank addition to one tensor of each layer, such as that of `q_proj`."""

    module: str
    """What checkpoints call the map, with `{layer}`: `model.layers.{layer}.self_attn.q_proj`."""
    rules: list[Rule]
    """Of our kernels that this tensor is made of, in the order of their parts; all have the same input."""

    @property
    def maps(self) -> list[str]:
        """The dotted paths of our linear maps, in the order of their parts."""
        return [rule.ours.removesuffix(".kernel") for rule in self.rules]

    @property
    def is_turned(self) -> bool:
        """Whether the tensor is `[fan_in, fan_out]`, and not as PyTorch's linear maps have it."""
        return self.rules[0].to_theirs is same


def adapters_of(spec: ModelSpec, targets: list[str]) -> list[Adapter]:
    """The adapters that a run file asks for.

    Arguments:
        spec: the architecture, of a family that checkpoints have.
        targets: names, or their ends after a dot, of modules; `*` stands for anything, `ALL` for every linear map of
            the layers.

    Where there are experts, PEFT takes the names of their maps for these alone, also where another map has that name.

    Raises:
        UserError: a target matches nothing, or something that can't have an adapter.
    """
    groups = [Adapter(parts[0].theirs.rpartition(".")[0], parts) for parts in shared_tensors(weights(spec))]
    experts = {_last(group.module) for group in groups if "{expert}" in group.module}
    able = [group for group in groups if _is_able(group) and _last(group.module) not in experts]
    others = [group for group in groups if group not in able and _is_matrix(group)]
    there = ", ".join(dict.fromkeys(group.module.rpartition("{layer}.")[2] for group in able))
    wanted: set[str] = set()
    for target in targets:
        if target == ALL:
            wanted |= {group.module for group in able}
            continue
        if refused := [group.module for group in others if _matches(group.module, target)]:
            raise UserError(
                f"lora.targets = {target!r}: is {refused[0]} too, and just linear maps of the layers can have "
                f"adapters, but none that is named as one of experts is; name some of {there}"
            )
        found = {group.module for group in able if _matches(group.module, target)}
        if not found:
            raise UserError(f"lora.targets = {target!r}: is no linear map of the family {spec.family}: {there}")
        wanted |= found
    return [group for group in able if group.module in wanted]


def a_of(maps: list[str], paths: Container[str]) -> str:
    """The path of the one `a` that the maps of an adapter share; it is kept with one of them.

    Arguments:
        maps: see `Adapter`.
        paths: of all parameters.
    """
    return next(name for name in (f"{path}.lora.a" for path in maps) if name in paths)


def target_names(spec: ModelSpec, adapters: list[Adapter]) -> list[str]:
    """The shortest ends of names by which exactly these modules are found.

    Arguments:
        spec: the architecture.
        adapters: some of those that it can have.
    """
    chosen = {adapter.module for adapter in adapters}
    others = {rule.theirs.rpartition(".")[0] for rule in weights(spec)} - chosen
    names = []
    for module in chosen:
        clashes = any(_last(other) == _last(module) for other in others)
        names.append(module.rpartition("{layer}.")[2] if clashes else _last(module))
    return sorted(set(names))


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _is_able(group: Adapter) -> bool:
    return all(rule.ours.endswith(".kernel") and "{layer}" in rule.theirs for rule in group.rules)


def _is_matrix(group: Adapter) -> bool:
    return not any(rule.ours.endswith((".scale", "bias")) for rule in group.rules)


def _matches(module: str, target: str) -> bool:
    return fnmatchcase(module, target) or fnmatchcase(module, f"*.{target}")
