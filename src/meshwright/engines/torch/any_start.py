"""Random parameters of a model that Meshwright doesn't know: as `transformers` would start it."""

import zlib
from typing import Any

import numpy as np
import torch

from meshwright.engines.torch.build import skeleton, tensors_of_model
from meshwright.engines.torch.weights import Weights
from meshwright.errors import UserError
from meshwright.hub.any_model import blocks_of
from meshwright.hub.tensor_file import Index
from meshwright.models.spec import ModelSpec


class OwnStart(Weights):
    """The distribution that the model's own class starts from; the same numbers on every mesh.

    At most a layer of it, or what stands outside the layers by itself, is in memory at a time.

    Arguments:
        spec: the architecture.
        seed: the run's.
    """

    def __init__(self, spec: ModelSpec, seed: int):
        self._seed, self._model = seed, skeleton(spec)
        self._buffers = {n: t.clone() for n, t in tensors_of_model(self._model).items() if not t.is_meta}
        self._prefix, self._blocks = blocks_of(self._model)
        self._made: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def tensor(self, name: str, index: Index) -> np.ndarray:
        """See `Weights.tensor`."""
        if name in self._buffers:
            return self._buffers[name].float().numpy()[index]
        unit = self._unit(name)
        if self._made[0] != unit:
            self._made = (unit, self._make(unit))
        return self._made[1][name].numpy()[index]

    def _unit(self, name: str) -> str:
        """The module that is made at once: the layer of a tensor, or else what owns it."""
        owner = name.rpartition(".")[0]
        if not self._blocks or not owner.startswith(f"{self._prefix}."):
            return owner
        return f"{self._prefix}.{owner.removeprefix(f'{self._prefix}.').split('.')[0]}"

    @torch.no_grad()
    def _make(self, unit: str) -> dict[str, torch.Tensor]:
        module: Any = self._model.get_submodule(unit)
        is_layer = unit.startswith(f"{self._prefix}.") and bool(self._blocks)
        module.to_empty(device="cpu", recurse=is_layer)
        for parameter in module.parameters(recurse=is_layer):
            parameter.fill_(torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{self._seed} {unit}".encode()))
            if is_layer:
                module.apply(self._model._init_weights)
            else:
                self._model._init_weights(module)
        beginning = f"{unit}." if unit else ""
        found = {f"{beginning}{name}": p.detach() for name, p in module.named_parameters(recurse=is_layer)}
        module.to("meta") if is_layer else module._apply(lambda t: t.to("meta"), recurse=False)
        if lacking := [name for name, value in found.items() if value.isnan().any()]:
            raise UserError(f"{lacking[0]}: transformers has no random start for it; name a checkpoint as model.init")
        return found
