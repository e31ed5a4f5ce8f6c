"""What checkpoints call the tensors of a model of `transformers`, where that isn't as the model calls them.

The library renames tensors while it reads, and puts the experts of a layer together, by lists of changes. Both are
undone here, so that what is written is as other checkpoints of the model are.
"""

import re
from typing import Any

from meshwright.models.weights import Rule

_ANY = "70710678"  # stands for the number of an expert while names are changed
_LAYER = "14142135"


class SavedNames:
    """The changes of a model, undone.

    Arguments:
        model: of `transformers`.
    """

    def __init__(self, model: Any):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        changes = get_model_conversion_mapping(model, add_legacy=False)
        self._joins = [change for change in changes if isinstance(change, WeightConverter)]
        renames = [change for change in changes if not isinstance(change, WeightConverter | PrefixChange)]
        self._back = [change.reverse_transform() for change in renames[::-1]]

    def of(self, name: str) -> str:
        """The name in a checkpoint.

        Arguments:
            name: as the model has it; may have `{layer}` for a number.
        """
        new = name.replace("{layer}", _LAYER)
        for change in self._back:
            new, _ = change.rename_source_key(new)
        return new.replace(_LAYER, "{layer}")

    def experts(self, name: str, shape: tuple[int, ...]) -> list[Rule]:
        """The rules of a tensor that checkpoints have in parts: one an expert and map.

        Arguments:
            name: as the model has it.
            shape: experts first, then the maps' outputs, one map's behind the other's.

        Returns:
            One a map; none where it isn't such a tensor.
        """
        for change in self._joins:
            (target, *more), maps = change.target_patterns, change.source_patterns
            if more or not re.search(target, name) or not _joins_experts(change) or shape[1] % len(maps):
                continue
            width, rules = shape[1] // len(maps), []
            for number, pattern in enumerate(maps):
                one = self.of(re.sub(target, pattern.replace("*", _ANY), name)).replace(_ANY, "{layer}")
                part = slice(number * width, (number + 1) * width) if len(maps) > 1 else None
                ours = f"{name}.{number}" if len(maps) > 1 else name
                rules.append(Rule(ours, one, otherwise=Rule(ours, name, part=part, axis=1)))
            return rules
        return []


def _joins_experts(change: Any) -> bool:
    """Whether it puts those of each map behind one another, and then the maps, and nothing else."""
    does = [(type(one).__name__, getattr(one, "dim", None)) for one in change.operations]
    return does == [("MergeModulelist", 0), ("Concatenate", 1)][: len(does)] and len(does) == min(
        2, len(change.source_patterns)
    )
