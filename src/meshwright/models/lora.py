"""Low-rank adapters (LoRA; Hu et al., 2021) on the linear maps of a decoder's layers.

Shapes: L layers, I and O widths of input and output, R rank.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.errors import UserError
from meshwright.models.layers import Linear, LowRank
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import Adapter, adapters_of

NAME = "lora"
"""What a linear map calls its adapter, and so a part of the path of every trained parameter."""


def adapted(
    make: Callable[..., Any], *, rank: int, scale: float, targets: list[str], seed: int
) -> Callable[..., nnx.Module]:
    """What makes a model, made to add adapters to it.

    Arguments:
        make: makes the model from `(spec, rngs=…)`; with `order_L=…` where layers lie out of order.
        rank: R.
        scale: what an adapter gives is multiplied by this.
        targets: see `adapters_of`.
        seed: of the initial numbers, which depend on nothing else than this, the layer, and the map's name.
    """

    def make_adapted(spec: ModelSpec, *, order_L: tuple[int, ...] | None = None, **more: Any) -> nnx.Module:
        model = make(spec, **more) if order_L is None else make(spec, order_L=order_L, **more)
        for adapter in adapters_of(spec, targets):
            _add(model, adapter, rank, scale, jax.random.key(seed), order_L)
        return model

    return make_adapted


def _add(
    model: Any, adapter: Adapter, rank: int, scale: float, key: jax.Array, order_L: tuple[int, ...] | None
) -> None:
    """Give the maps of one of their tensors an adapter: one `a` for all of them, since it's one map of one input."""
    linears = [_linear(model, path) for path in adapter.maps]
    layers, fan_in, _ = linears[0].kernel.shape
    numbers_L = adapter.rules[0].first_layer + jnp.array(order_L or range(layers))
    keys_L = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.fold_in(key, zlib.crc32(adapter.module.encode())), numbers_L
    )
    bound = 1 / math.sqrt(fan_in)  # Kaiming's uniform distribution with a = sqrt(5), as PEFT has it

    def initial(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (fan_in, rank), minval=-bound, maxval=bound)

    names_in = linears[0].kernel.get_metadata()["axes"][0]
    a_LIR = nnx.Param(jax.vmap(initial)(keys_L), axes=(names_in, None))
    for linear in linears:
        names_out = linear.kernel.get_metadata()["axes"][1]
        b_LRO = nnx.Param(jnp.zeros((layers, rank, linear.kernel.shape[-1])), axes=(None, names_out))
        setattr(linear, NAME, LowRank(a_LIR, b_LRO, scale))


def _linear(model: Any, path: str) -> Linear:
    module = model
    for name in path.split("."):
        module = getattr(module, name, None)
    if not isinstance(module, Linear):
        raise UserError(f"lora.targets: {path} is no linear map of this model; adapters need the family's own")
    return module


def without_base(params: dict) -> dict:
    """The adapters alone, of nested dictionaries of parameters."""
    parts = {name: part if name == NAME else without_base(part) for name, part in params.items() if _is_inner(part)}
    return {name: part for name, part in parts.items() if part}


def with_adapters(params: dict, adapters: dict) -> dict:
    """Parameters with other adapters.

    Arguments:
        params: of a model, with adapters or yet without.
        adapters: from `without_base`, of the same model.
    """
    merged = dict(params)
    for name, part in adapters.items():
        merged[name] = with_adapters(params[name], part) if name in params and name != NAME else part
    return merged


def _is_inner(part: Any) -> bool:
    return isinstance(part, dict)
