"""The parameters of a run with adapters on the host: with the adapters by themselves, or added to what they belong to.

Shapes: I and O widths of input and output, R rank.
"""

from collections.abc import Callable

import numpy as np

from meshwright.config_train import LoraSection
from meshwright.engines.torch.host import HostParameters
from meshwright.engines.torch.lora import A, B, modules_of
from meshwright.engines.torch.plan import Placed, own
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import Adapter, adapters_of


class HostAdapters:
    """Parameters with the adapters as some of their own; see `meshwright.hub.export.Parameters`.

    Arguments:
        placed: the model, on one device.
        spec, lora: of the run.
    """

    def __init__(self, placed: Placed, spec: ModelSpec, lora: LoraSection):
        self._base, self._placed = HostParameters(placed), placed
        self.shapes = dict(self._base.shapes)
        """Of each parameter by its dotted path."""
        self.pairs: dict[str, tuple[str, str]] = {}
        """Paths of the two parameters of each adapter, by that of the kernel that it is added to."""
        self._readers: dict[str, Callable[[int], np.ndarray]] = {}
        for adapter in adapters_of(spec, lora.targets):
            self._add(adapter, lora.rank)

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""
        if path not in self._readers:
            return self._base.read(path, index)
        if not index:
            return np.stack([self._readers[path](layer) for layer in range(self.shapes[path][0])])
        return self._readers[path](index[0])[index[1:]]

    def _add(self, adapter: Adapter, rank: int) -> None:
        modules = modules_of(adapter, self._placed.names)
        a = f"{adapter.maps[0]}.lora.a"
        for rule, path in zip(adapter.rules, adapter.maps, strict=True):
            layers, fan_in, fan_out = self.shapes[rule.ours]
            b = f"{path}.lora.b"

            def read_b(layer: int, rule=rule) -> np.ndarray:
                b_OR = self._tensor(f"{modules[layer]}.{B}")
                return rule.read(b_OR.T if adapter.is_turned else b_OR)

            self._readers[b] = read_b
            self.shapes |= {a: (layers, fan_in, rank), b: (layers, rank, fan_out)}
            self.pairs[rule.ours] = (a, b)
        self._readers[a] = lambda layer: self._tensor(f"{modules[layer]}.{A}").T

    def _tensor(self, name: str) -> np.ndarray:
        return own(self._placed.parameters[name]).float().cpu().numpy()


class Merged:
    """Parameters with the adapters added to those that they belong to.

    Arguments:
        adapters: of the run.
        scale: what an adapter gives is multiplied by this.
    """

    def __init__(self, adapters: HostAdapters, scale: float):
        self._adapters, self._scale = adapters, scale
        own_parameters = {path for pair in adapters.pairs.values() for path in pair}
        self.shapes = {path: shape for path, shape in adapters.shapes.items() if path not in own_parameters}
        """Of each parameter by its dotted path."""

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""
        value = self._adapters.read(path, index)
        if path not in self._adapters.pairs:
            return value
        a, b = (self._adapters.read(name, index) for name in self._adapters.pairs[path])
        return value + np.float32(self._scale) * (a @ b)
