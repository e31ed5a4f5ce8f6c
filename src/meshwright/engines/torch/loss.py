"""Cross-entropy of the tokens that count, in float32, some tokens at a time, and over shares of the vocabulary.

Shapes: N tokens, C tokens of a chunk, D width, V vocabulary (of this process).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from meshwright.engines.torch.collectives import TensorGroup, reduced

_LEAST, _MOST = 512, 16384


def score_chunk(memory: int | None, vocab: int) -> int:
    """Tokens whose scores are made at a time.

    On a CPU few enough for its cache. On a GPU the head's gradient is read and written once a chunk, so there are as
    many, a power of two, as take a sixteenth of its memory in float32, within bounds.

    Arguments:
        memory: of the GPU, bytes; None: a CPU.
        vocab: scores of a token, of this process.
    """
    if memory is None:
        return _LEAST
    return min(_MOST, max(_LEAST, 2 ** int(math.log2(memory / 16 / (4 * vocab)))))


class _Sum(torch.autograd.Function):
    """The gradient is computed along with the loss, while the scores of a chunk are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        kernel_VD: torch.Tensor,
        targets_N: torch.Tensor,
        weights_N: torch.Tensor,
        chunk: int,
        softcap: float,
        vocab: TensorGroup | None,
        first: int,
        parts: int | None,
    ) -> torch.Tensor:
        wants, wants_kernel = any(ctx.needs_input_grad), ctx.needs_input_grad[1]
        sums, slopes, _ = _compiled(x_ND.is_cuda)
        if wants_kernel and parts is not None:
            raise ValueError("sums of parts have no gradient for the head, whose parts aren't kept apart")
        losses_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_ND.device)
        d_x_ND = torch.empty_like(x_ND) if wants else None
        d_kernel_VD = None
        for start in range(0, len(x_ND), chunk):
            here = slice(start, start + chunk)
            x_CD, weights_C, local_C = x_ND[here], weights_N[here], targets_N[here] - first
            scores_CV = scores_of(x_CD, kernel_VD, softcap)
            largest_C, picked_C = sums(scores_CV, local_C)
            if vocab is not None:
                largest_C, picked_C = _over_vocabulary(largest_C, picked_C, vocab)
            losses_N[here] = (largest_C - picked_C) * weights_C
            if d_x_ND is None:
                continue
            d_CV = slopes(scores_CV, largest_C, local_C, weights_C, softcap, x_CD.dtype)
            d_x_ND[here] = d_CV @ kernel_VD
            if wants_kernel:
                d_kernel_VD = _product(d_CV.T, x_CD, onto=d_kernel_VD)
        if d_x_ND is not None:
            ctx.save_for_backward(d_x_ND, d_kernel_VD)
            ctx.kernel_dtype = kernel_VD.dtype
        return losses_N.sum() if parts is None else losses_N.view(parts, -1).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_x_ND, d_kernel_VD = ctx.saved_tensors
        scale = gradients[0]
        if d_kernel_VD is not None:
            _, _, scaled = _compiled(d_x_ND.is_cuda)
            d_kernel_VD = scaled(d_kernel_VD, scale, ctx.kernel_dtype)
        if scale.ndim:  # of parts, each by its own
            scale = scale.repeat_interleave(len(d_x_ND) // len(scale))[:, None]
        return (d_x_ND * scale).to(d_x_ND.dtype), d_kernel_VD, *(None,) * 7


def cross_entropy_sum(
    x_ND: torch.Tensor,
    kernel_VD: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    chunk: int,
    softcap: float = 0.0,
    vocab: TensorGroup | None = None,
    first: int = 0,
    parts: int | None = None,
) -> torch.Tensor:
    """The sum of the token losses, in nats; the same in every process of a tensor group.

    Arguments:
        x_ND: the residual stream after the last norm.
        kernel_VD: of the head.
        targets_N: the token that came.
        weights_N: 1 where the token counts, 0 where it doesn't; any number will do.
        chunk: at most so many tokens at a time.
        softcap: bound c of the scores, as c tanh(score / c); 0: none.
        vocab: the processes that share the vocabulary; None: this one has it all. The gradient of `x_ND` is then of
            this process's share.
        first: the token of the first row of `kernel_VD`.
        parts: into how many parts of the same length the tokens are cut, one after another, each with a sum of its own,
            `[parts]`; the head must then not be trained. None: all have one sum.
    """
    if not torch.is_grad_enabled():  # the sum can't see that, and would make a gradient
        x_ND, kernel_VD = x_ND.detach(), kernel_VD.detach()
    return _Sum.apply(x_ND, kernel_VD, targets_N, weights_N, chunk, softcap, vocab, first, parts)


def scores_of(x_CD: torch.Tensor, kernel_VD: torch.Tensor, softcap: float = 0.0) -> torch.Tensor:
    """What the head gives, `[C, V]` float32."""
    scores_CV = _product(x_CD, kernel_VD.T)
    return torch.tanh(scores_CV / softcap) * softcap if softcap else scores_CV


def _product(a: torch.Tensor, b: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b` in float32, whatever the type of what is multiplied; added to `onto` in its place, if that is given."""
    if a.is_cuda and a.dtype != torch.float32:
        if onto is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(onto, a, b, out_dtype=torch.float32, out=onto)
    return a.float() @ b.float() if onto is None else onto.addmm_(a.float(), b.float())


def _sums(scores_CV: torch.Tensor, local_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token, the logarithm of the sum of the scores' exponentials, and the target's score or 0, `[C]`."""
    is_here_C = (local_C >= 0) & (local_C < scores_CV.shape[1])
    picked_C = scores_CV.gather(1, torch.where(is_here_C, local_C, 0)[:, None])[:, 0]
    # Written so that it is compiled to one reading of the scores.
    highest_C1 = scores_CV.amax(dim=1, keepdim=True)
    total_C1 = (scores_CV - highest_C1).exp().sum(dim=1, keepdim=True)
    return (highest_C1 + total_C1.log())[:, 0], torch.where(is_here_C, picked_C, 0.0)


def _slopes(
    scores_CV: torch.Tensor,
    largest_C: torch.Tensor,
    local_C: torch.Tensor,
    weights_C: torch.Tensor,
    softcap: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the loss sum by what the head's product gives."""
    is_target_CV = torch.arange(scores_CV.shape[1], device=scores_CV.device) == local_C[:, None]
    d_CV = ((scores_CV - largest_C[:, None]).exp() - is_target_CV.float()) * weights_C[:, None]
    if softcap:
        d_CV = d_CV * (1 - (scores_CV / softcap).square())
    return d_CV.to(dtype)


def _scaled(d_VD: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product, rounded once."""
    return (d_VD * scale).to(dtype)


@cache
def _compiled(is_cuda: bool) -> tuple[Callable[..., Any], ...]:
    # All are bound by the memory of a card, where a compiled one reads what it is given once or twice.
    functions = (_sums, _slopes, _scaled)
    return tuple(torch.compile(function) for function in functions) if is_cuda else functions


def _over_vocabulary(
    largest_C: torch.Tensor, picked_C: torch.Tensor, vocab: TensorGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_sums` gives, of all shares of the vocabulary."""
    highest_C = reduced(largest_C, vocab.group, "max")
    total_2C = reduced(torch.stack([(largest_C - highest_C).exp(), picked_C]), vocab.group)
    return total_2C[0].log() + highest_C, total_2C[1]
