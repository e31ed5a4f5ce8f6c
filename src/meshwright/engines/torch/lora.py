"""Low-rank adapters (LoRA; Hu et al., 2021) on the linear maps of a model's layers.

Which maps get one, and what an export of them for the library `peft` is, is as with the JAX engine: see
`meshwright.models.targets` and `meshwright.hub.adapter`.

Shapes: I and O widths of input and output, R rank.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config_train import LoraSection
from meshwright.engines.torch.names import Names
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import Adapter, adapters_of

A, B = "lora_a", "lora_b"
"""What a map calls the two parameters of its adapter."""


class _Switch:
    on = True


def attach(model: Any, spec: ModelSpec, lora: LoraSection, names: Names) -> None:
    """Give maps their adapters, which alone are trained from here on; they have no numbers yet.

    Arguments:
        model: from `meshwright.engines.torch.build.skeleton`.
        spec: its architecture.
        lora: rank, scale and targets.
        names: of the model's tensors.

    Raises:
        UserError: a target matches nothing, or something that can't have an adapter.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.adapters = switch = _Switch()
    for adapter in adapters_of(spec, lora.targets):
        for name in modules_of(adapter, names):
            shape = names.theirs[f"{name}.weight"]
            fan_in, fan_out = shape if adapter.is_turned else shape[::-1]
            _attach(model.get_submodule(name), fan_in, fan_out, lora.rank, lora.scale, switch)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within, a model that `attach` was given computes as without adapters.

    Arguments:
        model: nothing computed within may have a gradient, as what is computed again for it would have adapters.
    """
    model.adapters.on = False
    try:
        yield
    finally:
        model.adapters.on = True


def modules_of(adapter: Adapter, names: Names) -> list[str]:
    """The maps that an adapter is on, one a layer."""
    rule = adapter.rules[0]
    return [name.rpartition(".")[0] for _, name in rule.tensors(names.ours[rule.ours])]


def initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The first numbers of an adapter's parameter: as `peft` has them, uniform, and zeros for what comes second.

    Arguments:
        name: of the parameter.
        shape: of all of it.
        seed: the run's; nothing else than this and the name decides.
    """
    if name.endswith(B):
        return np.zeros(shape, np.float32)
    bound = 1 / math.sqrt(shape[1])
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).uniform(-bound, bound, shape).astype(np.float32)


def _attach(module: Any, fan_in: int, fan_out: int, rank: int, scale: float, switch: _Switch) -> None:
    setattr(module, A, nn.Parameter(torch.empty(rank, fan_in, device="meta")))
    setattr(module, B, nn.Parameter(torch.empty(fan_out, rank, device="meta")))
    base = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not switch.on:
            return base(x)
        return base(x) + scale * F.linear(F.linear(x, module.lora_a), module.lora_b)

    module.forward = forward
