"""A micro-batch as one launch: the kernels of its forward and backward passes, recorded as a CUDA graph.

A layer is a dozen kernels, which a small micro-batch keeps busy for less time than the host takes to launch them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meshwright.engines.torch.copies import Copies
from meshwright.engines.torch.loss_model import Rows

_WARM_UPS = 2  # what is compiled, chosen and allocated on first use must not be recorded

Pass = Callable[[Rows, torch.Tensor], torch.Tensor]
"""From rows and the count of tokens of the whole batch to the loss sum; leaves gradients with the copies."""


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    rows: Rows
    tokens: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


class Recorded:
    """Forward and backward passes, each recorded for the shapes that it meets, and replayed.

    Arguments:
        one_pass: it must not wait for the device, nor draw random numbers.
        copies: of the parameters, whose memory stays where it is.
        add: is given the gradients by name, which the next replay overwrites.
    """

    def __init__(self, one_pass: Pass, copies: Copies, add: Callable[[dict[str, torch.Tensor]], None]):
        self._pass, self._copies, self._add = one_pass, copies, add
        self._recordings: dict[tuple, _Recording] = {}

    def __call__(self, rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
        """The loss sum; the gradients have been handed on. Both are whole when the device is done."""
        key = tuple(None if x is None else x.shape for x in rows)
        if key not in self._recordings:
            self._recordings[key] = self._record(rows, tokens)
        recording = self._recordings[key]
        for place, x in zip(recording.rows, rows, strict=True):
            if place is not None and x is not None:
                place.copy_(x)
        recording.tokens.copy_(tokens)
        recording.graph.replay()
        self._add(recording.gradients)
        return recording.loss

    def _record(self, rows: Rows, tokens: torch.Tensor) -> _Recording:
        places: list[Any] = [None if x is None else x.clone() for x in rows]
        rows, tokens = Rows(*places), tokens.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._pass(rows, tokens)
                self._copies.taken()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # A checkpoint may be on its way from the card meanwhile, in another thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._pass(rows, tokens)
        return _Recording(graph, rows, tokens, loss, self._copies.taken())
