"""Models of `transformers` that Meshwright doesn't know (`meshwright.hub.any_model`), called whole.

Masks, places, attention and head are the model's own, so that whatever it does between tokens and scores is done. What
can be got wrong is tried out on its own numbers before it is trained: that no score depends on a later token, nor on
another document where documents are kept apart.

Shapes: M rows, T time, N = M T, V vocabulary, of this process's share where it is shared.
"""

import inspect
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.config import Run
from meshwright.engines.torch.collectives import TensorGroup, reduced
from meshwright.engines.torch.loss_model import LossModel, Rows
from meshwright.engines.torch.tensor_plans import gathered_scores, share
from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec

_TRIED = 8  # tokens of a row
_LEAK = 1e-4  # of the largest score; rounding is alike in all rows
_LEAK_OF_EXPERTS = 1e-2  # in bfloat16, as each of them is given other tokens


class WholeModel(LossModel):
    """See `LossModel`."""

    def __init__(self, model: Any, spec: ModelSpec, tensor: TensorGroup | None, chunk: int):
        super().__init__(model, spec, tensor, chunk)
        self._named = inspect.signature(type(model).forward).parameters
        self._cache_key = next((key for key in ("cache", "past_key_values") if key in self._named), "")
        self.has_cache = bool(self._cache_key) and not model._is_stateful

    def loss(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LossModel.loss`; a router's own losses aren't part of it."""
        total = self._summed(rows)
        return total.detach(), total

    def _summed(self, rows: Rows, parts: int | None = None) -> torch.Tensor:
        scores_NV = self._scores(rows).flatten(0, 1)
        first = share(self._spec.vocab_size, self._tensor)[0] if self._tensor else 0
        targets_N, weights_N = rows.targets_MT.flatten(), rows.weights_MT.flatten()
        return _Sum.apply(scores_NV, targets_N - first, weights_N, self._chunk, self._tensor, parts)

    def scores(self, tokens_MT: torch.Tensor) -> torch.Tensor:
        """See `LossModel.scores`."""
        return self.row_scores(Rows(tokens_MT, tokens_MT, tokens_MT))

    def row_scores(self, rows: Rows) -> torch.Tensor:
        """Scores of the token after each, of the whole vocabulary, `[M, T, V]` float32."""
        scores_MTV = self._scores(rows).float()
        if self._tensor is None:
            return scores_MTV
        whole_NV = gathered_scores(scores_MTV.flatten(0, 1), self._spec.vocab_size, self._tensor)
        return whole_NV.view(*scores_MTV.shape[:2], -1)

    def next_scores(
        self, tokens_MT: torch.Tensor, mask_MS: torch.Tensor, positions_MT: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """See `LossModel.next_scores`."""
        more = self._those_named(position_ids=positions_MT, use_cache=True)
        out = self.model(input_ids=tokens_MT, attention_mask=mask_MS, **{self._cache_key: cache}, **more)
        scores_MV = out.logits[:, -1].float()
        return scores_MV if self._tensor is None else gathered_scores(scores_MV, self._spec.vocab_size, self._tensor)

    def _scores(self, rows: Rows) -> torch.Tensor:
        # Places that begin anew tell a model where documents begin. Otherwise it counts them itself.
        positions = {} if rows.segments_MT is None else self._those_named(position_ids=rows.positions_MT)
        return self.model(input_ids=rows.inputs_MT, **positions, **self._those_named(use_cache=False)).logits

    def _those_named(self, **arguments: Any) -> dict[str, Any]:
        return {key: value for key, value in arguments.items() if key in self._named}


def check_masks(placed: Any, run: Run) -> None:
    """Try out whether scores depend on what they mustn't; every process of a run calls it.

    Arguments:
        placed: the model (`meshwright.engines.torch.plan.Placed`), with its numbers.
        run: whether documents are kept apart.

    Raises:
        UserError: they do.
    """
    time, packing = min(_TRIED, run.train.sequence_length), run.data.packing
    apart = packing == "pairs" or (packing == "packed" and run.data.document_mask)
    half, vocab = time // 2, run.model.vocab_size or placed.config.vocab_size
    tokens_3T = np.tile(np.random.default_rng(0).integers(0, vocab, time), (3, 1))
    tokens_3T[1, -1] = (tokens_3T[1, -1] + vocab // 2) % vocab
    tokens_3T[2, :half] = (tokens_3T[2, :half] + vocab // 2) % vocab
    tokens = torch.from_numpy(tokens_3T).to(placed.mesh.device)
    place_T = torch.arange(time, device=placed.mesh.device)
    segments, positions = (1 + (place_T >= half).long(), torch.where(place_T < half, place_T, place_T - half))
    documents = (segments.expand(3, -1), positions.expand(3, -1)) if apart else (None, None)
    with torch.compiler.set_stance("force_eager"), placed.used() as module:
        module.eval()
        scores_3TV = module(module.row_scores, Rows(tokens, tokens, tokens, *documents))
    routed = placed.dtype != torch.float32 and any(".experts." in name for name in placed.tensors)
    kind, kept = placed.config.model_type, scores_3TV.abs().max() * (_LEAK_OF_EXPERTS if routed else _LEAK)
    if _anywhere((scores_3TV[0, :-1] - scores_3TV[1, :-1]).abs().max() > kept, placed):
        raise UserError(
            f"config.json: model_type = {kind!r}: its scores of a token depend on tokens that come later, so that it "
            "can't be trained to go on with a text; choose a causal language model"
        )
    if apart and _anywhere((scores_3TV[0, half:] - scores_3TV[2, half:]).abs().max() > kept, placed):
        instead = 'set data.document_mask = false, or data.packing to "padded" or "stream"'
        raise UserError(
            f'data.packing = "{packing}": models of model_type {kind!r} don\'t keep the documents of a row apart; '
            f"{'choose another model' if packing == 'pairs' else instead}"
        )


def _anywhere(found: torch.Tensor, placed: Any) -> bool:
    group = dist.group.WORLD if placed.mesh.mesh is not None else None
    return bool(reduced(found.float(), group, "max"))


class _Sum(torch.autograd.Function):
    """The sum of the token losses (nats) by given scores, in float32; of a shared vocabulary the same everywhere.

    With `parts`, as many sums: see `meshwright.engines.torch.loss.cross_entropy_sum`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores_NV: torch.Tensor,
        local_N: torch.Tensor,
        weights_N: torch.Tensor,
        chunk: int,
        vocab: TensorGroup | None,
        parts: int | None,
    ) -> torch.Tensor:
        largest, picked = [], []
        for scores_CV, local_C in zip(scores_NV.split(chunk), local_N.split(chunk), strict=True):
            exact_CV, is_here_C = scores_CV.float(), (local_C >= 0) & (local_C < scores_CV.shape[1])
            largest.append(exact_CV.logsumexp(dim=1))
            picked_C = exact_CV.gather(1, torch.where(is_here_C, local_C, 0)[:, None])[:, 0]
            picked.append(torch.where(is_here_C, picked_C, 0.0))
        largest_N, picked_N = torch.cat(largest), torch.cat(picked)
        if vocab is not None:
            highest_N = reduced(largest_N, vocab.group, "max")
            total_2N = reduced(torch.stack([(largest_N - highest_N).exp(), picked_N]), vocab.group)
            largest_N, picked_N = total_2N[0].log() + highest_N, total_2N[1]
        ctx.save_for_backward(scores_NV, local_N, weights_N, largest_N)
        ctx.chunk = chunk
        losses_N = (largest_N - picked_N) * weights_N
        return losses_N.sum() if parts is None else losses_N.view(parts, -1).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scores_NV, local_N, weights_N, largest_N = ctx.saved_tensors
        d_NV, scale = torch.empty_like(scores_NV), gradients[0]
        scale = scale.repeat_interleave(len(weights_N) // len(scale)) if scale.ndim else scale
        pieces = (x.split(ctx.chunk) for x in (scores_NV, local_N, weights_N * scale, largest_N, d_NV))
        for scores_CV, local_C, weights_C, largest_C, d_CV in zip(*pieces, strict=True):
            is_target_CV = torch.arange(scores_CV.shape[1], device=scores_CV.device) == local_C[:, None]
            d_CV.copy_(((scores_CV.float() - largest_C[:, None]).exp() - is_target_CV.float()) * weights_C[:, None])
        return d_NV, *(None,) * 5
