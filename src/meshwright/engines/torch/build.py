"""The model of a run as a module of `transformers`, before its parameters exist."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from meshwright.engines.torch.attention import NAME
from meshwright.errors import UserError
from meshwright.hub.any_model import make
from meshwright.models.hf import hf_from_spec
from meshwright.models.spec import ANY, ModelSpec


class FusedMaps(nn.Module):
    """Several maps in one product, as GPT-2's queries, keys and values: each can be cut by itself.

    It takes the place of a `Conv1D`; the numbers lie as they do there. I and O are widths of input and output, P the
    number of maps.

    Arguments:
        conv: what it takes the place of.
        parts: P.
    """

    def __init__(self, conv: Conv1D, parts: int):
        super().__init__()
        self.weight = nn.Parameter(conv.weight.view(conv.nx, parts, conv.nf // parts))
        self.bias = nn.Parameter(conv.bias.view(parts, conv.nf // parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., I]` to `[..., P O]`."""
        return fused(x, self.weight, self.bias)


def fused(x: torch.Tensor, weight_IPO: torch.Tensor, bias_PO: torch.Tensor) -> torch.Tensor:
    """What a `FusedMaps` does."""
    y = torch.addmm(bias_PO.flatten(), x.reshape(-1, x.shape[-1]), weight_IPO.flatten(1))
    return y.view(*x.shape[:-1], y.shape[-1])


def skeleton(spec: ModelSpec) -> Any:
    """The model with parameters that take no memory; what it computes from its config alone is there.

    Arguments:
        spec: the architecture, with its vocabulary.

    Raises:
        UserError: its family has no form in `transformers`.
    """
    if spec.family == ANY:  # with attention and masks of its own
        with _parameters_on_meta():
            return make(spec)
    config: dict[str, Any] = hf_from_spec(spec)
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        made = AutoConfig.for_model(**config)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(made, attn_implementation=NAME, dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"model.family = {spec.family!r}: this version of transformers can't make it "
            f'({type(error).__name__}: {error}); install another, or set engine = "jax"'
        ) from error
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D) and name == "c_attn":
                setattr(module, name, FusedMaps(child, 3))
    return model


def tensor_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Of each tensor that a checkpoint holds, by the name that it has there; what is tied is there once.

    Arguments:
        model: from `skeleton`.
    """
    fused = {name for name, module in model.named_modules() if isinstance(module, FusedMaps)}
    found = {}
    for name, tensor in tensors_of_model(model).items():
        shape = tuple(tensor.shape)
        found[name] = (*shape[:-2], shape[-2] * shape[-1]) if name.rpartition(".")[0] in fused else shape
    return found


def tensors_of_model(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that a checkpoint holds."""
    parameters = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    return {**parameters, **{name: kept[name] for name, _ in model.named_buffers() if name in kept}}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    # Under `torch.device("meta")` buffers would be without numbers, too, and these are in no checkpoint.
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
