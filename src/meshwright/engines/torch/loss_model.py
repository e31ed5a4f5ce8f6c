"""The outermost module of a run: from rows of a batch to the loss sum, or to the scores of the next token.

Shapes: M rows, T time, D width, V vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.engines.torch.collectives import TensorGroup
from meshwright.engines.torch.loss import cross_entropy_sum, scores_of
from meshwright.engines.torch.routing import RouterLosses
from meshwright.engines.torch.tensor_plans import gathered_scores, local, share
from meshwright.models.spec import ModelSpec


class Rows(NamedTuple):
    """Rows of a batch on the device; see `meshwright.data.examples.Batch`."""

    inputs_MT: torch.Tensor
    targets_MT: torch.Tensor
    weights_MT: torch.Tensor
    segments_MT: torch.Tensor | None = None
    positions_MT: torch.Tensor | None = None


class LossModel(nn.Module):
    """A model with its loss inside, so that what shards parameters sees all uses of each.

    Arguments:
        model: of `transformers`.
        spec: its architecture.
        tensor: the processes that share its tensors, if it is cut.
        chunk: how many tokens' scores are made at a time.
    """

    def __init__(self, model: Any, spec: ModelSpec, tensor: TensorGroup | None, chunk: int):
        super().__init__()
        self.model = model
        self._spec, self._tensor, self._chunk = spec, tensor, chunk
        self._routers = RouterLosses(model, spec) if spec.experts else None
        named = inspect.signature(type(model.base_model).forward).parameters
        self._cache_key = "cache" if "cache" in named else "past_key_values"
        self.has_cache = True
        """Whether keys and values are all that it remembers of a text."""

    def forward(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Do one of this module's own methods; what shards parameters gathers them around it."""
        return job(*arguments)

    def loss(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the token losses, and that with the routers' losses added, whose gradient is wanted."""
        if self._routers:
            self._routers.listen()
        total = self._summed(rows)
        return total.detach(), total if self._routers is None else total + self._routers.take(rows.weights_MT)

    def row_losses(self, rows: Rows) -> torch.Tensor:
        """Of each row the sum of its token losses times their weights, `[M]`; its head must not be trained."""
        return self._summed(rows, len(rows.inputs_MT))

    def _summed(self, rows: Rows, parts: int | None = None) -> torch.Tensor:
        x_MTD = self._hidden(rows)
        first = share(self._spec.vocab_size, self._tensor)[0] if self._tensor else 0
        if self._tensor:
            x_MTD = self._tensor.enter(x_MTD)
        return cross_entropy_sum(
            x_MTD.flatten(0, 1),
            local(self.model.get_output_embeddings().weight),
            rows.targets_MT.flatten(),
            rows.weights_MT.flatten(),
            chunk=self._chunk,
            softcap=self._spec.final_softcap,
            vocab=self._tensor,
            first=first,
            parts=parts,
        )

    def scores(self, tokens_MT: torch.Tensor) -> torch.Tensor:
        """Scores of the token after each, `[M, T, V]` float32."""
        x_MTD = self._hidden(Rows(tokens_MT, tokens_MT, tokens_MT))
        return scores_of(x_MTD.flatten(0, 1), self._head(), self._spec.final_softcap).view(*tokens_MT.shape, -1)

    def next_scores(
        self, tokens_MT: torch.Tensor, mask_MS: torch.Tensor, positions_MT: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Scores of the token after the last, `[M, V]` float32; what was seen goes into the cache.

        Arguments:
            tokens_MT: those that aren't in the cache yet.
            mask_MS: 1 where a place so far holds a token.
            positions_MT: theirs.
            cache: of `transformers`.
        """
        x_MTD = self.model.base_model(
            inputs_embeds=self.model.get_input_embeddings()(tokens_MT),
            attention_mask=mask_MS,
            position_ids=positions_MT,
            use_cache=True,
            **{self._cache_key: cache},
        ).last_hidden_state
        scores_MV = scores_of(x_MTD[:, -1], self._head(), self._spec.final_softcap)
        return scores_MV if self._tensor is None else gathered_scores(scores_MV, self._spec.vocab_size, self._tensor)

    def _head(self) -> torch.Tensor:
        return local(self.model.get_output_embeddings().weight)

    def _hidden(self, rows: Rows) -> torch.Tensor:
        positions_MT = rows.positions_MT
        if positions_MT is None:
            positions_MT = torch.arange(rows.inputs_MT.shape[1], device=rows.inputs_MT.device)[None]
        embedded_MTD = self.model.get_input_embeddings()(rows.inputs_MT)
        if self._tensor and self._spec.positions == "learned":  # they are added to each process's share of time
            positions_MT = self._tensor.share_of_time(positions_MT)
        more = {} if rows.segments_MT is None else {"segments_BT": rows.segments_MT}
        return self.model.base_model(
            inputs_embeds=embedded_MTD, position_ids=positions_MT, use_cache=False, **more
        ).last_hidden_state
