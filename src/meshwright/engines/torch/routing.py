"""The losses of routers, as the JAX engine has them (`meshwright.models.routing`).

Shapes: M rows, T time, E experts, J choices of a token.
"""

from typing import Any

import torch
import torch.nn.functional as F

from meshwright.models.spec import ModelSpec


class RouterLosses:
    """Listens to a model's routers.

    Arguments:
        model: of `transformers`, of a family whose routers give their scores first.
        spec: its architecture.
    """

    def __init__(self, model: Any, spec: ModelSpec):
        self._spec, self._scores_NE, self._listening = spec, list[torch.Tensor](), False
        if spec.balance_loss or spec.router_z_loss:
            for name, module in model.named_modules():
                if name.endswith(".mlp.gate"):
                    module.register_forward_hook(self._hear)

    def _hear(self, _module: Any, _arguments: Any, out: Any) -> None:
        if self._listening and torch.is_grad_enabled():
            self._scores_NE.append(out[0])

    def listen(self) -> None:
        """Hear what is said until `take`; what is computed again for the backward pass comes after that."""
        self._listening = True

    def take(self, weights_MT: torch.Tensor) -> torch.Tensor:
        """The sum over layers and tokens of what was heard since, which is forgotten.

        Arguments:
            weights_MT: 1 where a token counts.
        """
        heard, self._scores_NE, self._listening = self._scores_NE, [], False
        parts = [self._loss(scores_NE.float().view(*weights_MT.shape, -1), weights_MT) for scores_NE in heard]
        return sum(parts, torch.zeros((), device=weights_MT.device))

    def _loss(self, scores_MTE: torch.Tensor, weights_MT: torch.Tensor) -> torch.Tensor:
        spec, chosen = self._spec, min(self._spec.experts_per_token, self._spec.experts)
        shares_MTE = scores_MTE.softmax(dim=-1)
        sent_MTE = F.one_hot(shares_MTE.topk(chosen).indices, spec.experts).sum(dim=2) * weights_MT[..., None]
        load_ME, tokens_M = sent_MTE.sum(dim=1), weights_MT.sum(dim=1)
        safe_M1 = torch.where(tokens_M > 0, tokens_M, 1.0)[:, None]
        frequency_ME = load_ME * (spec.experts / chosen) / safe_M1
        share_ME = (shares_MTE * weights_MT[..., None]).sum(dim=1) / safe_M1
        balance = (tokens_M * (frequency_ME * share_ME).sum(dim=-1)).sum()
        size = (weights_MT * scores_MTE.logsumexp(dim=-1).square()).sum()
        return spec.balance_loss * balance + spec.router_z_loss * size
