"""Ray Train's backend of a run of the PyTorch engine."""

from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.torch.config import TorchConfig

from meshwright.launch.ray_backend import ProcessesBackend


@dataclass
class TorchProcesses(TorchConfig):
    """Each worker joins by itself: Ray's own way would have it see the cards of all workers of its machine."""

    desk: Any = None
    """See `JaxProcesses`."""

    @property
    def backend_cls(self) -> type[Backend]:
        """See `TorchConfig`."""
        return ProcessesBackend

    @property
    def train_func_context(self) -> Any:
        """See `BackendConfig`; the engine chooses the card."""
        return BackendConfig().train_func_context
