"""The baselines on a GPU: plain PyTorch training steps of GPT-2 and of Llama, as nanoGPT writes them.

`torch.compile`, bfloat16 autocast over float32 parameters, scaled-dot-product attention, fused AdamW with decay on
matrices only, gradient clipping, full scores; the vocabulary is padded to a multiple of 64. Shapes: B batch, T time,
D width, H heads, C head width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_gpt2 import GPT2


class LlamaAttention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_BTD.shape
        sizes = [heads * self.head_width for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(batch, time, -1, self.head_width).transpose(1, 2) for part in self.qkv(x_BTD).split(sizes, dim=2)
        )
        q, k = turn(q, cos_TC, sin_TC), turn(k, cos_TC, sin_TC)
        y_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y_BHTC.transpose(1, 2).reshape(batch, time, width))


def turn(x_BHTC: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """Rotary positions, half-split."""
    first, second = x_BHTC.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TC - second * sin_TC, second * cos_TC + first * sin_TC), dim=-1)
    return turned.to(x_BHTC.dtype)


class LlamaBlock(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn_width: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = LlamaAttention(width, heads, kv_heads)
        self.gate, self.up = nn.Linear(width, ffn_width, bias=False), nn.Linear(width, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD), cos_TC, sin_TC)
        y_BTD = self.norm_2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Llama(nn.Module):
    """Llama with tied embeddings; returns the mean loss."""

    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, ffn_width: int, time: int, vocab: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, ffn_width) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        waves = 500_000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles_TC = torch.arange(time)[:, None] * waves
        self.register_buffer("cos_TC", angles_TC.cos())
        self.register_buffer("sin_TC", angles_TC.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(inputs_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TC, self.sin_TC)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.view(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))


def make_step(case: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function from inputs and targets, `[B, T]` on the GPU, to the loss, which it doesn't wait for.

    Arguments:
        case: of `gpu_train.CASES`.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    vocab = -(-case["vocab"] // 64) * 64
    if case["family"] == "gpt2":
        model = GPT2(case["width"], case["layers"], case["heads"], case["time"], vocab)
    else:
        names = ("width", "layers", "heads", "kv_heads", "ffn_width", "time")
        model = Llama(**{name: case[name] for name in names}, vocab=vocab)
    model = model.cuda()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)

    def step(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(inputs_BT, targets_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
