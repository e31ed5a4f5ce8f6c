"""Text generation with the key-value cache of `transformers`: prompts padded on the left, a token at a time.

Shapes: B prompts, P padded prompt length, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from meshwright.engines.base import Sampling
from meshwright.engines.prompts import check_prompts
from meshwright.engines.torch.plan import Placed
from meshwright.models.spec import ANY, ModelSpec


def generate(
    placed: Placed, spec: ModelSpec, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
) -> Iterator[list[int | None]]:
    """See `Engine.generate`; every process of a run calls it with the same arguments.

    Raises:
        UserError: a prompt is empty, or a prompt and what is to come exceed the context length.
    """
    longest = check_prompts(prompts, max_tokens, spec.context_length)
    if not placed.module.has_cache:
        yield from _without_cache(placed, spec, prompts, max_tokens, stop, sampling)
        return
    device = placed.mesh.device
    tokens_BP = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths_B = np.array([len(prompt) for prompt in prompts])
    place_P = torch.arange(longest, device=device)
    missing_B1 = torch.tensor(longest - lengths_B, device=device)[:, None]
    mask_BS = (place_P >= missing_B1).long()
    positions_BT = (place_P - missing_B1).clamp(min=0)
    cache, ended = DynamicCache(config=placed.config), np.zeros(len(prompts), bool)
    for number in range(max_tokens):
        with _decoding(placed, spec), placed.used() as module:
            module.eval()
            scores_BV = module(module.next_scores, tokens_BP, mask_BS, positions_BT, cache)
        chosen_B = _agreed(sample(scores_BV.cpu().numpy(), lengths_B + number - 1, sampling), placed)
        ended |= chosen_B == stop
        if ended.all():
            return
        yield [None if done else int(token) for token, done in zip(chosen_B, ended, strict=True)]
        tokens_BP = torch.from_numpy(chosen_B).to(device)[:, None]
        mask_BS = torch.cat([mask_BS, torch.ones_like(tokens_BP)], dim=1)
        positions_BT = positions_BT[:, -1:] + 1


def _without_cache(
    placed: Placed, spec: ModelSpec, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
) -> Iterator[list[int | None]]:
    """Of a model whose memory isn't keys and values: each text from its beginning for each token, by itself."""
    texts, ended = [list(prompt) for prompt in prompts], np.zeros(len(prompts), bool)
    for _ in range(max_tokens):
        with _decoding(placed, spec), placed.used() as module:
            module.eval()
            rows = [torch.tensor([text], device=placed.mesh.device) for text in texts]
            scores_BV = torch.cat([module(module.scores, row_1T)[:, -1] for row_1T in rows])
        place_B = np.array([len(text) - 1 for text in texts])
        chosen_B = _agreed(sample(scores_BV.cpu().numpy(), place_B, sampling), placed)
        ended |= chosen_B == stop
        if ended.all():
            return
        yield [None if done else int(token) for token, done in zip(chosen_B, ended, strict=True)]
        for text, token in zip(texts, chosen_B, strict=True):
            text.append(int(token))


def sample(scores_BV: np.ndarray, position_B: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Choose a token for each row.

    Top-k is applied first, then top-p (Holtzman et al., 2020) to what is left; the likeliest token always stays.

    Arguments:
        scores_BV: float32.
        position_B: where the token before stands; with the seed and the row it makes the random numbers.
        sampling: how.

    Returns:
        Token ids, `[B]`.
    """
    if sampling.temperature <= 0:
        return scores_BV.argmax(axis=-1)
    chosen = []
    for row, (scores_V, position) in enumerate(zip(scores_BV, position_B, strict=True)):
        scaled_V = scores_V.astype(np.float64) / max(sampling.temperature, 1e-6)
        allowed_V = _allowed(scaled_V, sampling)
        noise_V = np.random.default_rng([sampling.seed, row, int(position)]).gumbel(size=len(scaled_V))
        chosen.append(int(np.where(allowed_V, scaled_V + noise_V, -np.inf).argmax()))
    return np.array(chosen)


def _allowed(scaled_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return np.ones(len(scaled_V), bool)
    sorted_V = np.sort(scaled_V)[::-1]
    kept_V = sorted_V[: sampling.top_k] if sampling.top_k > 0 else sorted_V
    shares_V = np.exp(kept_V - kept_V[0])
    shares_V /= shares_V.sum()
    many = max(1, int((np.cumsum(shares_V) - shares_V < sampling.top_p).sum()))
    return scaled_V >= kept_V[many - 1]


def _agreed(chosen_B: np.ndarray, placed: Placed) -> np.ndarray:
    # Replicas may round differently, and one that ended earlier would leave the others waiting.
    if placed.mesh.mesh is None:
        return chosen_B
    tokens_B = torch.from_numpy(chosen_B)
    dist.broadcast(tokens_B, 0, group=placed.mesh.host_group)
    return tokens_B.numpy()


@contextmanager
def _decoding(placed: Placed, spec: ModelSpec) -> Iterator[None]:
    """With attention that knows a cache, and time uncut; uncompiled, as a cache would compile each layer anew."""
    config: Any = placed.config
    before, tensor = config._attn_implementation, placed.mesh.tensor
    if spec.family != ANY:
        config._attn_implementation = "eager" if spec.attention_softcap else "sdpa"
    cuts_time = tensor is not None and tensor.cuts_time
    if tensor is not None:
        tensor.cuts_time = False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        config._attn_implementation = before
        if tensor is not None:
            tensor.cuts_time = cuts_time
