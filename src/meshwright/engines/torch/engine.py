"""The PyTorch engine: models of `transformers`, as replicas, in shares (FSDP2) or cut; state stays on the device."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.base import RESTORED, Sampling
from meshwright.engines.flops import training_flops
from meshwright.engines.peaks import peak_flops
from meshwright.engines.torch.any_model import check_masks
from meshwright.engines.torch.checkpoint import restore_state, save_state
from meshwright.engines.torch.collectives import reduced
from meshwright.engines.torch.decode import generate
from meshwright.engines.torch.fingerprint import base_fingerprint
from meshwright.engines.torch.flat_optimizer import FlatOptimizer
from meshwright.engines.torch.host import HostParameters, logits, logits_of
from meshwright.engines.torch.host_lora import HostAdapters, Merged
from meshwright.engines.torch.mesh import TorchMesh, make_torch_mesh
from meshwright.engines.torch.optimizer import Optimizer
from meshwright.engines.torch.plan import Placed, own
from meshwright.engines.torch.separate_optimizer import SeparateOptimizer
from meshwright.engines.torch.start import start
from meshwright.engines.torch.step import Step, evaluate
from meshwright.engines.torch.support import check_supported
from meshwright.errors import UserError
from meshwright.hub.export import Parameters
from meshwright.hub.reader import Checkpoint
from meshwright.models.spec import ANY, ModelSpec


class TorchEngine:
    """See `meshwright.engines.base.Engine`. Of several processes each makes one, after the default group.

    Arguments:
        run: a checked run file.
        spec: the architecture, with its vocabulary size.
        model, optimizer, metrics: a researcher's own parts are for the JAX engine; None.
        training: false where the engine only evaluates and generates: it then holds no optimizer state.

    Raises:
        UserError: the run asks for what this engine lacks, or the mesh doesn't fit.
    """

    def __init__(
        self,
        run: Run,
        spec: ModelSpec,
        *,
        model: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        training: bool = True,
    ):
        check_supported(run, spec, model, optimizer, metrics)
        self._run, self._spec = run, spec
        if torch.cuda.is_available():
            torch.compiler.reset()  # a function is compiled for a few models alone, then no more
        if run.train.deterministic and torch.cuda.is_available():
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
            torch.use_deterministic_algorithms(True)
        mesh = make_torch_mesh(run, spec, training=training)
        with _room(*_kept(run, mesh, training=training)):
            self._build(mesh, training=training)

    def _build(self, mesh: TorchMesh, *, training: bool) -> None:
        run, spec = self._run, self._spec
        self._placed = placed = Placed(run, spec, mesh)
        self.rows = mesh.rows(run.train.batch_size)
        self.parameters = sum(math.prod(shape) for shape in placed.names.theirs.values())
        self.trained_parameters = sum(parameter.numel() for parameter in placed.parameters.values())
        self.active_parameters = self.parameters - _idle(placed, spec)
        self.token_seconds = self._token_seconds()
        self.description = f"{_device(mesh)}, {str(placed.dtype).removeprefix('torch.')}{_mesh_in_words(mesh)}"
        if placed.quantized:
            self.description += "; the layers' maps in 4 bits (NF4)"
        self.identity = {"model": placed.config.architectures[0], "optimizer.kind": run.optimizer.kind}
        if run.lora.rank or (training and run.model.init != RESTORED):  # else a checkpoint holds all
            start(placed, run, spec)
        if run.lora.rank:
            self.identity["lora (fingerprint of the base)"] = base_fingerprint(placed)
        self._optimizer: Optimizer | None = None
        if training:
            if run.model.init != RESTORED:
                self._check_masks()
            flat = placed.copies and FlatOptimizer(run, placed.copies, mesh.accumulate, mesh.batch_group)
            self._optimizer = flat or SeparateOptimizer(run, placed)
            self._step = Step(run, placed, self._optimizer)

    def train_step(self, batch: Batch, stop: int = 0) -> dict[str, Any]:
        """See `Engine.train_step`."""
        advice = f'lower it, set train.remat (now "{self._run.train.remat}"), or raise mesh.fsdp'
        with _room(self._sequences("a step"), advice):
            return self._step(batch, stop)

    def eval_step(self, batch: Batch) -> tuple[Any, Any]:
        """See `Engine.eval_step`."""
        with _room(self._sequences("an evaluation"), "lower it, or use more cards"):
            return evaluate(self._placed, batch, self._run)

    @contextmanager
    def trace(self, folder: Path) -> Iterator[None]:
        """See `Engine.trace`."""
        profile, own = torch.profiler.profile(), folder / time.strftime("%Y_%m_%d_%H_%M_%S")
        try:
            with profile:
                yield
        finally:
            own.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(own / "perfetto_trace.json.gz"))

    def is_finite(self) -> bool:
        """See `Engine.is_finite`."""
        parts = [own(tensor) for tensor in self._placed.tensors.values()]
        broken = sum((~torch.isfinite(part)).sum() for part in parts)
        assert isinstance(broken, torch.Tensor)
        return not bool(reduced(broken, dist.group.WORLD if self._placed.mesh.mesh is not None else None))

    def save(self, folder: Path) -> Callable[[], None]:
        """See `Engine.save`."""
        assert self._optimizer is not None
        return save_state(folder, self._placed, self._optimizer)

    def restore(self, folder: Path) -> None:
        """See `Engine.restore`."""
        restore_state(folder, self._placed, self._optimizer)
        if self._run.model.init == RESTORED and self._optimizer:
            self._check_masks()

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """See `Engine.generate`."""
        what = f"max_tokens = {max_tokens}: so many after each of {len(prompts)} prompts at once"
        with _room(what, "lower it, or give fewer prompts"):
            yield from generate(self._placed, self._spec, prompts, max_tokens, stop, sampling)

    def on_host(self) -> Parameters:
        """See `Engine.on_host`."""
        lora = self._run.lora
        return Merged(self.adapters_on_host(), lora.scale) if lora.rank else HostParameters(self._placed)

    def adapters_on_host(self) -> HostAdapters:
        """See `Engine.adapters_on_host`; the other parameters can be read too."""
        return HostAdapters(self._placed, self._spec, self._run.lora)

    def logits(self, tokens_BT: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """See `Engine.logits`."""
        return logits(self.on_host(), self._run, self._spec, self._exact_device(), tokens_BT, dtype)

    def logits_of(self, checkpoint: Checkpoint, tokens_BT: np.ndarray) -> np.ndarray:
        """See `Engine.logits_of`."""
        return logits_of(checkpoint, self._run, self._exact_device(), tokens_BT)

    def _sequences(self, what: str) -> str:
        size, length = self._run.micro_batch_size, self._run.train.sequence_length
        return f"train.micro_batch_size = {size}: {what} of so many sequences of {length} tokens"

    def _check_masks(self) -> None:
        if self._spec.family == ANY:
            check_masks(self._placed, self._run)

    def _exact_device(self) -> torch.device:
        """Where a whole model in float32 is made: a card that it is put into 4 bits for has no room for it."""
        return torch.device("cpu") if self._placed.quantized else self._placed.mesh.device

    def _token_seconds(self) -> float | None:
        """See `Engine.token_seconds`; the peak is one of bfloat16."""
        placed, run = self._placed, self._run
        mesh = placed.mesh
        peak = peak_flops(torch.cuda.get_device_name(mesh.device)) if mesh.device.type == "cuda" else None
        # How many of unknown experts a token passes isn't known.
        if peak is None or placed.dtype != torch.bfloat16 or "expert" in self._spec.config:
            return None
        adapters = self.trained_parameters if run.lora.rank else 0
        sizes, reference = (self.active_parameters, run.train.sequence_length), run.data.packing == "pairs"
        flops = training_flops(self._spec, *sizes, adapters, reference=reference)
        return flops / (peak * (1 if mesh.mesh is None else mesh.mesh.size()))


@contextmanager
def _room(what: str, advice: str) -> Iterator[None]:
    """Tell a user whose card is too small what was done, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{what} finds no room on the card; {advice}") from error


def _kept(run: Run, mesh: TorchMesh, *, training: bool) -> tuple[str, str]:
    """What an engine keeps on each card, and how to have less there."""
    if run.lora.quantize != "none":  # which isn't shared out
        return "model: the whole of it in 4 bits", "choose a smaller model, or a larger card"
    if not training:
        return "model: the whole of it", 'take a larger card, or the CPU by CUDA_VISIBLE_DEVICES=""'
    what = f"mesh.fsdp = {mesh.sizes['fsdp']}: a process's share of the model and of what training keeps beside it"
    if run.lora.rank:
        return what, 'raise it, or set lora.quantize = "nf4"'
    return what, 'raise it, or train adapters by [lora], also with lora.quantize = "nf4"'


def _idle(placed: Placed, spec: ModelSpec) -> int:
    """How many parameters have no part in the computation of one token."""
    if not spec.experts:
        return 0
    many = sum(placed.tensors[name].numel() for name in placed.names.theirs if ".experts." in name)
    return many * (spec.experts - min(spec.experts_per_token, spec.experts)) // spec.experts


def _device(mesh: TorchMesh) -> str:
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    many = 1 if mesh.mesh is None else mesh.mesh.size()
    return f"{many} x {name}" if many > 1 else name


def _mesh_in_words(mesh: TorchMesh) -> str:
    words = [f"{name} {size}" for name, size in mesh.sizes.items() if size > 1]
    return f"; {' x '.join(words)}" if words else ""
