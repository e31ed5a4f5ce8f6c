"""The loss sum by itself: its gradient is made where it is wanted, and nowhere else."""

import pytest
import torch

from meshwright.engines.torch import loss


def some(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("memory", "vocab", "tokens"),
    [
        (None, 151_936, 512),
        (140 * 2**30, 151_936, 8192),  # 9.2 GiB would be too many
        (24 * 2**30, 151_936, 2048),
        (140 * 2**30, 50_257, 16_384),
        (2 * 2**30, 151_936, 512),
    ],
)
def test_as_many_tokens_at_a_time_as_the_memory_allows(memory, vocab, tokens):
    assert loss.score_chunk(memory, vocab) == tokens
    if memory and 512 < tokens < 16_384:
        assert 4 * vocab * tokens <= memory / 16 < 4 * vocab * 2 * tokens


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_it_is_the_plain_one_chunk_by_chunk(softcap):
    x_ND, kernel_VD = some(0, 10, 8).requires_grad_(), some(1, 33, 8).requires_grad_()
    targets_N, weights_N = torch.arange(10), (torch.arange(10) % 3 > 0).float()
    found = loss.cross_entropy_sum(x_ND, kernel_VD, targets_N, weights_N, chunk=4, softcap=softcap)
    gradients = torch.autograd.grad(found, (x_ND, kernel_VD))
    scores_NV = x_ND @ kernel_VD.T
    scores_NV = softcap * torch.tanh(scores_NV / softcap) if softcap else scores_NV
    plain = (torch.nn.functional.cross_entropy(scores_NV, targets_N, reduction="none") * weights_N).sum()
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(plain, (x_ND, kernel_VD)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert other.abs().max() > 0.1


def test_an_evaluation_makes_no_gradient(monkeypatch):
    calls, slopes = [], loss._slopes

    def counted(*arguments):
        calls.append(1)
        return slopes(*arguments)

    monkeypatch.setattr(loss, "_compiled", lambda _: (loss._sums, counted, loss._scaled))
    x_ND, kernel_VD = some(0, 10, 8), some(1, 33, 8).requires_grad_()
    given = (x_ND, kernel_VD, torch.arange(10), torch.ones(10))
    with torch.no_grad():
        quiet = loss.cross_entropy_sum(*given, chunk=5)
    assert not calls
    assert loss.cross_entropy_sum(*given, chunk=5).item() == quiet.item()
    assert len(calls) == 2
