"""Maps whose numbers are kept in 4 bits: NF4 with double quantisation (QLoRA; Dettmers et al., 2023), by bitsandbytes.

A number is one of sixteen levels times the largest of its block of 64; those largest ones, less their mean, are kept in
8 bits, by a scale for each 256. A product makes a map's numbers in the type of what it is given, uses them and forgets
them; so does its gradient. It is one operation, so that nothing that compiles or computes again keeps them in between.

Shapes: I and O widths of input and output.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from meshwright.engines.torch.build import FusedMaps
from meshwright.engines.torch.lora import modules_of
from meshwright.engines.torch.names import Names
from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import ALL, adapters_of

_BLOCK, _SCALES = 64, 256  # numbers, and scales, that share a scale


class Packed(NamedTuple):
    """A matrix in 4 bits."""

    codes: torch.Tensor
    """Two numbers a byte."""
    scales: torch.Tensor
    """The largest number of each block, in 8 bits."""
    spans: torch.Tensor
    """The scales of those, float32."""
    mean: torch.Tensor
    """What was taken off those before, float32."""


def check_device(device: torch.device) -> None:
    """Refuse a device that can't do it, or a machine that lacks the library.

    Raises:
        UserError: with what to do.
    """
    if device.type != "cuda":
        raise UserError('lora.quantize = "nf4": QLoRA runs on CUDA only, and no card is seen; take a machine with one')
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "lora.quantize = \"nf4\": needs bitsandbytes, which isn't installed; pip install 'meshwright[qlora]'"
        )


def pack(matrix: torch.Tensor) -> Packed:
    """The nearest matrix that 4 bits have.

    Arguments:
        matrix: `[O, I]`, float32; its blocks go along I.
    """
    library = _library()
    codes, state = library.quantize_4bit(matrix.contiguous(), blocksize=_BLOCK, quant_type="nf4")
    # In float64, so that it is the same number on every card, whatever the order in which that adds up.
    mean = state.absmax.double().mean().float()
    scales, of_scales = library.quantize_blockwise(state.absmax - mean, code=_levels(matrix.device), blocksize=_SCALES)
    return Packed(codes, scales, of_scales.absmax, mean)


def unpack(packed: Packed, fan_out: int, fan_in: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix, `[O, I]`, of a type."""
    library = _library()
    levels = _levels(packed.codes.device)
    of_scales = library.QuantState(packed.spans, code=levels, blocksize=_SCALES, dtype=torch.float32)
    largest = library.dequantize_blockwise(packed.scales, of_scales) + packed.mean
    state = library.QuantState(largest, torch.Size((fan_out, fan_in)), None, _BLOCK, "nf4", dtype)
    return library.dequantize_4bit(packed.codes, state)


@torch.library.custom_op("meshwright::nf4_product", mutates_args=())
def product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    spans: torch.Tensor,
    mean: torch.Tensor,
    bias: torch.Tensor | None,
    fan_out: int,
) -> torch.Tensor:
    """`[..., I]` to `[..., O]`, by a matrix in 4 bits and a bias `[O]`, which has no gradient."""
    matrix_OI = unpack(Packed(codes, scales, spans, mean), fan_out, x.shape[-1], x.dtype)
    return F.linear(x.reshape(-1, x.shape[-1]), matrix_OI, bias).view(*x.shape[:-1], fan_out)


@torch.library.custom_op("meshwright::nf4_gradient", mutates_args=())
def gradient(
    dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, spans: torch.Tensor, mean: torch.Tensor, fan_in: int
) -> torch.Tensor:
    """Of `product`, to `x`: `[..., O]` to `[..., I]`."""
    matrix_OI = unpack(Packed(codes, scales, spans, mean), dy.shape[-1], fan_in, dy.dtype)
    return (dy.reshape(-1, dy.shape[-1]) @ matrix_OI).view(*dy.shape[:-1], fan_in)


@product.register_fake
def _(x: Any, codes: Any, scales: Any, spans: Any, mean: Any, bias: Any, fan_out: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], fan_out)


@gradient.register_fake
def _(dy: Any, codes: Any, scales: Any, spans: Any, mean: Any, fan_in: int) -> torch.Tensor:
    return dy.new_empty(*dy.shape[:-1], fan_in)


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, *packed, _, _ = inputs
    ctx.save_for_backward(*packed)
    ctx.fan_in = x.shape[-1]


def _backward(ctx: Any, dy: torch.Tensor) -> Any:
    return gradient(dy, *ctx.saved_tensors, ctx.fan_in), *[None] * 6


product.register_autograd(_backward, setup_context=_keep)


class Nf4Map(nn.Module):
    """A linear map in 4 bits, in the place of one of `transformers`.

    Arguments:
        whole: that one, whose parameters may have no memory yet.
    """

    def __init__(self, whole: Any):
        super().__init__()
        self.shape = tuple(whole.weight.shape)
        """Of the weight, as `whole` has it."""
        self._is_turned = not isinstance(whole, nn.Linear)
        self._fan_in = self.shape[0] if self._is_turned else self.shape[1]
        self._fan_out = whole.weight.numel() // self._fan_in
        self.bias = whole.bias
        for name in Packed._fields:
            self.register_buffer(name, None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., I]` to `[..., O]`."""
        bias = None if self.bias is None else self.bias.flatten()
        return product(x, self.codes, self.scales, self.spans, self.mean, bias, self._fan_out)

    def put(self, weight: torch.Tensor, name: str) -> None:
        """Take other numbers.

        Arguments:
            weight: on the device, float32, of the shape that a checkpoint has or `shape`.
            name: what to call it in an error.

        Raises:
            UserError: one of them isn't finite, which 4 bits don't show.
        """
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"model.init: {name} holds numbers that aren't finite; give a checkpoint that is whole")
        matrix_OI = weight.reshape(self._fan_in, -1).T if self._is_turned else weight
        for part, value in pack(matrix_OI)._asdict().items():
            setattr(self, part, value)

    def value(self) -> torch.Tensor:
        """The weight that it computes with, before it is rounded to the type of its input: `shape`, float32."""
        parts = Packed(*(getattr(self, part) for part in Packed._fields))
        matrix_OI = unpack(parts, self._fan_out, self._fan_in, torch.float32)
        return (matrix_OI.T if self._is_turned else matrix_OI).reshape(self.shape)

    @property
    def weight(self) -> torch.Tensor:
        """Isn't there: what reads it instead of calling the map must not train."""
        raise UserError(
            'lora.quantize = "nf4": a layer of this model uses the numbers of a linear map by itself, which 4 bits '
            'can\'t give; set it to "none"'
        )


def replace(model: Any, spec: ModelSpec, names: Names) -> dict[str, Nf4Map]:
    """Put the layers' linear maps into 4 bits; they have no numbers yet.

    Arguments:
        model: from `meshwright.engines.torch.build.skeleton`.
        spec: its architecture.
        names: of the model's tensors.

    Returns:
        The maps, by the names of their weights.

    Raises:
        UserError: one of them isn't a map of the usual kind.
    """
    found = {}
    for adapter in adapters_of(spec, [ALL]):
        for name in modules_of(adapter, names):
            module = model.get_submodule(name)
            if not (isinstance(module, Conv1D | FusedMaps) or type(module).forward is nn.Linear.forward):
                raise UserError(
                    f'lora.quantize = "nf4": {name} is a {type(module).__name__}, which isn\'t known in 4 bits; set it '
                    'to "none"'
                )
            found[f"{name}.weight"] = Nf4Map(module)
            model.set_submodule(name, found[f"{name}.weight"])
    return found


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """The values that 8 bits have."""
    return _library().create_dynamic_map().to(device)


@cache
def _library() -> Any:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # of kernels that no GPU needs
    from bitsandbytes import functional

    return functional
