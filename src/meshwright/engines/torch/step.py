"""One update, and one evaluation, on one global batch.

Shapes: A micro-batches of M rows (of this process), T time.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.config import Run
from meshwright.data.examples import Batch
from meshwright.engines.torch.collectives import reduced
from meshwright.engines.torch.flat_optimizer import FlatOptimizer
from meshwright.engines.torch.loss_model import Rows
from meshwright.engines.torch.optimizer import Optimizer
from meshwright.engines.torch.plan import Placed
from meshwright.engines.torch.preference import SUMS, has_pair, preference
from meshwright.engines.torch.recorded import Recorded


class Step:
    """Trains a model.

    Arguments:
        run: seed, clipping, what to do with a loss that isn't finite, and whether pairs are trained on, are read.
        placed: the model, whose parameters change in place.
        optimizer: of its parameters.
    """

    def __init__(self, run: Run, placed: Placed, optimizer: Optimizer):
        self._run, self._placed, self._optimizer = run, placed, optimizer
        self._of_pairs = run.data.packing == "pairs"
        on_card, random = placed.mesh.device.type == "cuda", run.model.dropout > 0
        # The experts of `transformers` ask the device how many tokens each of them has; what a class of its own asks
        # isn't known.
        known = run.model.family != "transformers" and not run.model.experts
        recordable = on_card and known and not random and not self._of_pairs
        self._recorded = None
        if recordable and placed.copies and isinstance(optimizer, FlatOptimizer):
            self._recorded = Recorded(self._pass, placed.copies, optimizer.add)

    def __call__(self, batch: Batch, stop: int) -> dict[str, Any]:
        """One update; see `Engine.train_step`."""
        placed, optimizer, mesh = self._placed, self._optimizer, self._placed.mesh
        rows_A = place(batch, placed)
        tokens = reduced(sum(rows.weights_MT.sum() for rows in rows_A), mesh.batch_group)  # type: ignore[arg-type]
        count = self._pairs(rows_A) if self._of_pairs else tokens
        means = self._accumulate(rows_A, count.clamp(min=1.0)) / count.clamp(min=1.0)
        loss = means[0]
        norm = optimizer.norm()
        shrink = None
        if limit := self._run.optimizer.clip_norm:
            shrink = (limit / norm.clamp(min=1e-12)).clamp(max=1.0)
        values = dict(zip(SUMS, means, strict=False))
        values |= {"grad_norm": norm, "tokens": tokens, "learning_rate": optimizer.rate(optimizer.count)}
        if mesh.mesh is not None:
            values["stop"] = reduced(torch.tensor(stop, device=mesh.device), dist.group.WORLD, "max")
        # Under `skip` the host waits for the device here, as it must not begin what it would have to undo.
        if self._run.train.on_nonfinite == "skip" and not bool(torch.isfinite(loss + norm)):
            optimizer.skip()
        else:
            optimizer.step(shrink)
        return values

    def _pairs(self, rows_A: list[Rows]) -> torch.Tensor:
        """How many the global batch has."""
        return reduced(torch.cat([has_pair(rows) for rows in rows_A]).sum(), self._placed.mesh.batch_group)

    def _accumulate(self, rows_A: list[Rows], count: torch.Tensor) -> torch.Tensor:
        """Leave the gradients of the loss with the parameters, and return its sum over the global batch, `[1]`; of
        pairs all `SUMS`, `[3]`."""
        module = self._placed.module
        total = torch.zeros(len(SUMS) if self._of_pairs else 1, device=self._placed.mesh.device)
        module.train()
        for number, rows in enumerate(rows_A):
            if isinstance(module, FSDPModule):  # before the last, each process adds up its own
                module.set_requires_gradient_sync(number == len(rows_A) - 1)
            if self._run.model.dropout:
                torch.manual_seed(self._dropout_seed(number))
            if self._recorded:
                total += self._recorded(rows, count)
                continue
            total += self._pass(rows, count)
            self._optimizer.collect()
        return reduced(total, self._placed.mesh.batch_group)

    def _pass(self, rows: Rows, count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a micro-batch; the gradients stay with what the module computes with."""
        module = self._placed.module
        if self._of_pairs:
            sums, objective = module(preference, module, rows, self._run.dpo.beta)
        else:
            sums, objective = module(module.loss, rows)
        (objective / count).backward()
        return sums

    def _dropout_seed(self, number: int) -> int:
        mesh = self._placed.mesh
        place = [self._run.seed, self._optimizer.count, number, mesh.place("data"), mesh.place("fsdp")]
        return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def evaluate(placed: Placed, batch: Batch, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss sum of a global batch and the count of its tokens, without dropout; of pairs that of their losses and
    the count of pairs."""
    total = torch.zeros(2, device=placed.mesh.device)
    with placed.used() as module:
        module.eval()
        for rows in place(batch, placed):
            if run.data.packing == "pairs":
                sums, _ = module(preference, module, rows, run.dpo.beta)
                total += torch.stack([sums[0], has_pair(rows).sum()])
            else:
                total += torch.stack([module(module.loss, rows)[0], rows.weights_MT.sum()])
    loss, count = reduced(total, placed.mesh.batch_group)
    return loss, count


def place(batch: Batch, placed: Placed) -> list[Rows]:
    """This process's rows of a global batch, `[A M, T]`, as A micro-batches on its device."""

    def on_device(x: np.ndarray | None) -> list[Any]:
        if x is None:
            return [None] * placed.mesh.accumulate
        kind = torch.float32 if x.dtype.kind == "f" else torch.int64
        host = torch.from_numpy(np.ascontiguousarray(x)).to(kind)
        host = host.pin_memory() if placed.mesh.device.type == "cuda" else host
        return list(host.to(placed.mesh.device, non_blocking=True).chunk(placed.mesh.accumulate))

    return [Rows(*parts) for parts in zip(*map(on_device, batch), strict=True)]
