"""The baseline: a plain PyTorch GPT-2 training step, float32, as one would write it today.

`torch.compile`, scaled-dot-product attention, fused AdamW with decay on matrices only, gradient clipping, tied
embeddings, full logits. Shapes: B batch, T time, D width, H heads, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_BTD.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BTD).split(width, dim=2)
        )
        y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BHTC.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2; returns the mean loss."""

    def __init__(self, width: int, layers: int, heads: int, time: int, vocab: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(inputs_BT) + self.positions(torch.arange(inputs_BT.shape[1], device=inputs_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.view(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))


def make_step(
    width: int, layers: int, heads: int, time: int, vocab: int, threads: int
) -> Callable[[np.ndarray, np.ndarray], float]:
    """A function from inputs and targets, `[B, T]`, to the loss; each call is one update."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2(width, layers, heads, time, vocab)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    compiled = torch.compile(model)

    def step(inputs_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        loss = compiled(torch.from_numpy(inputs_BT).long(), torch.from_numpy(targets_BT).long())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step
