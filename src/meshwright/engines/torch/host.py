"""The parameters on the host, slice by slice, and scores of whole models: what an export is made of and proven by."""

import numpy as np
import torch

from meshwright.config import Run
from meshwright.config_train import LoraSection
from meshwright.engines.torch.mesh import TorchMesh
from meshwright.engines.torch.names import Names, write_tensor
from meshwright.engines.torch.plan import Placed
from meshwright.engines.torch.support import AXES
from meshwright.engines.torch.weights import CheckpointWeights, Weights
from meshwright.hub.export import Parameters
from meshwright.hub.reader import Checkpoint
from meshwright.hub.tensor_file import Index
from meshwright.models.hf import spec_from_hf
from meshwright.models.spec import ModelSpec


class HostParameters:
    """The parameters of a run on the host; see `meshwright.hub.export.Parameters`.

    Arguments:
        placed: the model, on one device.
    """

    def __init__(self, placed: Placed):
        self.shapes = placed.names.ours
        """Of each parameter by its dotted path."""
        self._placed = placed
        self._last: tuple[str, np.ndarray] = ("", np.empty(0))

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""
        return self._placed.names.read(path, index, self._tensor)

    def _tensor(self, name: str) -> np.ndarray:
        if self._last[0] != name:  # a tensor of all experts is asked for once an expert
            value = self._placed.part(name).float().cpu().numpy()
            self._last = (name, value.reshape(self._placed.names.theirs[name]))
        return self._last[1]


class _Rounded(Weights):
    """The tensors of a module, made of our parameters, rounded to a type."""

    def __init__(self, parameters: Parameters, names: Names, dtype: str):
        self._parameters, self._names, self._dtype = parameters, names, getattr(torch, dtype)

    def tensor(self, name: str, index: Index) -> np.ndarray:
        """See `Weights.tensor`."""
        value = torch.from_numpy(write_tensor(self._names, name, self._parameters.read)[index].copy())
        return value.to(self._dtype).float().numpy()


def logits(
    parameters: Parameters, run: Run, spec: ModelSpec, device: torch.device, tokens_BT: np.ndarray, dtype: str
) -> np.ndarray:
    """See `Engine.logits`."""
    placed = _exact(run, spec, device)
    placed.fill(_Rounded(parameters, placed.names, dtype))
    return _scores(placed, tokens_BT)


def logits_of(checkpoint: Checkpoint, run: Run, device: torch.device, tokens_BT: np.ndarray) -> np.ndarray:
    """See `Engine.logits_of`."""
    spec = spec_from_hf(checkpoint.config, run.model.family)
    placed = _exact(run, spec, device)
    placed.fill(CheckpointWeights(checkpoint, placed.names, spec))
    return _scores(placed, tokens_BT)


def _exact(run: Run, spec: ModelSpec, device: torch.device) -> Placed:
    """A model without adapters, on one device, which computes in float32."""
    train = run.train.model_copy(update={"compute_dtype": "float32"})
    plain = run.model_copy(update={"train": train, "lora": LoraSection()})
    return Placed(plain, spec, TorchMesh(dict.fromkeys(AXES, 1), device, 1))


def _scores(placed: Placed, tokens_BT: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(tokens_BT.astype(np.int64)).to(placed.mesh.device)
    with placed.used() as module:
        module.eval()
        return torch.cat([module(module.scores, row_1T) for row_1T in tokens.split(1)]).cpu().numpy()
