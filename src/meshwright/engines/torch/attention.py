"""Attention as training computes it, under the name by which models of `transformers` find it.

Those models make masks themselves: of the length that they see, which under sequence parallelism isn't the whole, and
by looking at numbers on the device, which waits for it. With this function none is made: it is told by arguments that
the models hand through.

Shapes: B batch, H heads, T time, W width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "meshwright"
"""Of this attention, for `attn_implementation`."""


def attention(
    module: Any,
    query_BHTW: torch.Tensor,
    key_BHTW: torch.Tensor,
    value_BHTW: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments_BT: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within a window and within documents.

    Arguments:
        module: asks; not used.
        query_BHTW, key_BHTW, value_BHTW: of this process's heads; keys and values may have fewer.
        attention_mask: none is ever made under this name.
        scaling: what scores are multiplied by.
        dropout: the share of weights to zero.
        sliding_window: how many tokens a token sees, itself included; None: all before it.
        softcap: bound c of the scores, as c tanh(score / c).
        segments_BT: see `meshwright.data.examples.Batch`; None: a row is one document.

    Returns:
        `[B, T, H, W]`, and no weights.
    """
    time = query_BHTW.shape[2]
    allowed = None
    if segments_BT is not None or (sliding_window and sliding_window < time):
        allowed = _allowed(time, sliding_window, segments_BT, query_BHTW.device)
    if softcap:
        out = _capped(query_BHTW, key_BHTW, value_BHTW, allowed, scaling, dropout, softcap)
    else:
        out = F.scaled_dot_product_attention(
            query_BHTW,
            key_BHTW,
            value_BHTW,
            attn_mask=allowed,
            dropout_p=dropout,
            is_causal=allowed is None,
            scale=scaling,
            enable_gqa=query_BHTW.shape[1] != key_BHTW.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def _allowed(time: int, window: int | None, segments_BT: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Which key each query sees, `[1 or B, 1, T, T]`; each sees itself at least, so that no row is empty."""
    place_T = torch.arange(time, device=device)
    back_TT = place_T[:, None] - place_T[None, :]
    allowed_TT = back_TT >= 0
    if window:
        allowed_TT = allowed_TT & (back_TT < window)
    if segments_BT is None:
        return allowed_TT[None, None]
    return (allowed_TT & (segments_BT[:, :, None] == segments_BT[:, None, :]))[:, None]


def _capped(
    query_BHTW: torch.Tensor,
    key_BHTW: torch.Tensor,
    value_BHTW: torch.Tensor,
    allowed: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
) -> torch.Tensor:
    groups = query_BHTW.shape[1] // key_BHTW.shape[1]
    key_BHTW, value_BHTW = (x.repeat_interleave(groups, dim=1) for x in (key_BHTW, value_BHTW))
    scale = query_BHTW.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHTT = (query_BHTW @ key_BHTW.transpose(2, 3)).float() * scale
    scores_BHTT = torch.tanh(scores_BHTT / softcap) * softcap
    if allowed is None:
        allowed = _allowed(scores_BHTT.shape[-1], None, None, scores_BHTT.device)
    weights_BHTT = scores_BHTT.masked_fill(~allowed, -torch.inf).softmax(dim=-1).to(value_BHTW.dtype)
    return F.dropout(weights_BHTT, dropout) @ value_BHTW


AttentionInterface.register(NAME, attention)
