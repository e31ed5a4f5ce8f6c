"""Which of a run's parameters are trained, and what follows where they are adapters alone (LoRA)."""

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.config import Run
from meshwright.models.lora import NAME, adapted, with_adapters, without_base
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import a_of, adapters_of

if TYPE_CHECKING:
    from meshwright.engines.jax.hf import HostParameters

_SPREAD = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))  # odd, with bits all over


def model_of(run: Run, model: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the model of a run: with adapters, where it is to have some.

    Arguments:
        run: `lora` and the seed are read.
        model: makes the model that they are added to.
    """
    lora = run.lora
    if not lora.rank:
        return model
    return adapted(model, rank=lora.rank, scale=lora.scale, targets=lora.targets, seed=run.seed)


class Trained:
    """The part of the parameters that gradients, optimizer and checkpoints see.

    Arguments:
        adapters: whether that is adapters alone; else it is all.
    """

    def __init__(self, *, adapters: bool):
        self.adapters = adapters

    def of(self, params: Any) -> Any:
        """That part of nested dictionaries of parameters."""
        return without_base(params) if self.adapters else params

    def put(self, part: Any, params: Any) -> Any:
        """Parameters with another such part."""
        return with_adapters(params, part) if self.adapters else part


def base_fingerprint(params: Any, order_L: np.ndarray | None) -> jax.Array:
    """Two numbers that tell the parameters of one base from those of another, `[2]` uint32.

    Sums of the numbers' bits, each multiplied by one that its place makes, modulo 2^32: so they depend neither on the
    mesh nor on zeros that pad the vocabulary.

    Arguments:
        params: float32; adapters among them don't count.
        order_L: which layer lies at each place of the stacked blocks; None: in order.
    """
    total = jnp.zeros(2, jnp.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [part.key for part in path]
        if NAME in names:
            continue
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        order = order_L if names[0] == "blocks" else None
        total += jnp.stack([jnp.sum(bits * _places(leaf.shape, order, ".".join(names), *two)) for two in _SPREAD])
    return total


def _places(shape: tuple[int, ...], order_L: np.ndarray | None, name: str, one: int, other: int) -> jax.Array:
    place = jnp.full(shape, zlib.crc32(name.encode()), jnp.uint32)
    for axis, size in enumerate(shape):
        numbers = jnp.asarray(order_L if axis == 0 and order_L is not None else np.arange(size), jnp.uint32)
        numbers = jnp.expand_dims(numbers, [other for other in range(len(shape)) if other != axis])
        place = (place + numbers) * jnp.uint32(one)
        place ^= place >> 15
    return (place * jnp.uint32(other)) | jnp.uint32(1)


class Merged:
    """Parameters on the host with their adapters added, one slice at a time; see `meshwright.hub.export.Parameters`.

    Arguments:
        parameters: of a model with adapters.
        spec, run: of that model.
    """

    def __init__(self, parameters: "HostParameters", spec: ModelSpec, run: Run):
        self.shapes = {path: shape for path, shape in parameters.shapes.items() if NAME not in path.split(".")}
        """Of each parameter by its dotted path."""
        self._all, self._scale = parameters, run.lora.scale
        self._adapters: dict[str, tuple[str, str]] = {}
        for adapter in adapters_of(spec, run.lora.targets):
            a = a_of(adapter.maps, parameters.shapes)
            self._adapters |= {f"{path}.kernel": (a, f"{path}.{NAME}.b") for path in adapter.maps}

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""
        value = self._all.read(path, index)
        if path not in self._adapters:
            return value
        a, b = (self._all.read(name, index) for name in self._adapters[path])
        return value + np.float32(self._scale) * (a @ b)
