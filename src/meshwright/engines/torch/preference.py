"""Direct Preference Optimization (DPO; Rafailov et al., 2023), the reference being the model with its adapters off.

Shapes: M rows, of a pair of texts each; T time.
"""

import torch
import torch.nn.functional as F

from meshwright.data.pairs import REJECTED_SEGMENT
from meshwright.engines.torch.lora import adapters_off
from meshwright.engines.torch.loss_model import LossModel, Rows

SUMS = ("loss", "reward_margin", "reward_accuracy")
"""What `preference` sums over pairs. The reward of a text is beta times the logarithm of how much likelier than the
reference the model has it; the margin is the chosen text's less the rejected one's, and accuracy the share of pairs
where it is above 0."""


def preference(module: LossModel, rows: Rows, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`-log sigmoid(margin)`, summed over pairs; to be called as a job of the module.

    Arguments:
        module: with adapters.
        rows: from `meshwright.data.pairs.Pairs`.
        beta: see `SUMS`.

    Returns:
        The `SUMS`, `[3]`, and the sum of losses again, whose gradient is wanted.
    """
    # Losses are what log-probabilities are with the sign turned, and just the two texts' difference matters.
    assert rows.segments_MT is not None
    is_rejected_MT = rows.segments_MT == REJECTED_SEGMENT
    signed = rows._replace(weights_MT=torch.where(is_rejected_MT, -rows.weights_MT, rows.weights_MT))
    was_training = module.training
    with torch.no_grad(), adapters_off(module.model):
        module.eval()
        reference_M = module.row_losses(signed)
    module.train(was_training)
    margins_M, pairs_M = beta * (reference_M - module.row_losses(signed)), has_pair(rows)
    objective = (F.softplus(-margins_M) * pairs_M).sum()
    rewards = torch.stack([margins_M.detach(), (margins_M.detach() > 0).float()])
    return torch.cat([objective.detach()[None], (rewards * pairs_M).sum(dim=1)]), objective


def has_pair(rows: Rows) -> torch.Tensor:
    """1 for each row with a pair, 0 for one that just fills a batch up, `[M]`."""
    return (rows.weights_MT > 0).any(dim=1).float()
