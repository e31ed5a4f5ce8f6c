"""Parameters that lie in one tensor, updated in one pass: against PyTorch's own optimizer on each by itself."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import torch
from families import theirs
from torch import nn
from torch_jobs import FAMILIES, Layout, batch, make_engine, make_run

import meshwright as mw
from meshwright.engines.torch.copies import Copies
from meshwright.engines.torch.flat import Flat
from meshwright.engines.torch.flat_optimizer import FlatOptimizer
from meshwright.engines.torch.optimizer import make_schedule

SHAPES = {"bias": (5,), "matrix": (3, 5), "norm": (200,), "table": (7, 40)}
MATRICES = {"matrix", "table"}


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def gradients(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}


def run_of(**optimizer):
    sections = {"optimizer": {"learning_rate": 0.03, "weight_decay": 0.3, **optimizer}, "train": {"steps": 8}}
    return mw.make_run({"engine": "torch", "data": {"train": "x"}, "model": {"preset": "gpt2-mini"}, **sections})


def made(run, accumulate=1):
    torch.manual_seed(0)
    module = Parts()
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    copies = Copies(module, torch.bfloat16, MATRICES)
    with torch.no_grad():
        for name, value in start.items():
            copies.stored[name].copy_(value)
    return module, start, copies, FlatOptimizer(run, copies, accumulate)


def test_adamw_is_that_of_pytorch_on_each_parameter_by_itself():
    run = run_of(beta2=0.97)
    module, start, copies, ours = made(run)
    plain = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [plain[name] for name in SHAPES if (name in MATRICES) == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, betas=(run.optimizer.beta1, 0.97), eps=1e-8)
    rate, shrink = make_schedule(run), torch.tensor(0.7)
    for step in range(6):
        ours.add(gradients(step))
        for name, gradient in gradients(step).items():
            plain[name].grad = gradient.float() * shrink
        exact = torch.cat([gradient.double().flatten() for gradient in gradients(step).values()]).norm()
        torch.testing.assert_close(ours.norm().double(), exact, rtol=1e-6, atol=0)
        for group in groups:
            group["lr"] = rate(step)
        for group in theirs.param_groups:
            group["lr"] = rate(step)
        theirs.step()
        ours.step(shrink)
    for name, value in plain.items():
        torch.testing.assert_close(copies.stored[name], value, rtol=1e-6, atol=1e-6)
        assert (value - start[name]).abs().mean() > 1e-2  # it has moved
        used = getattr(module, name)
        assert used.dtype == torch.bfloat16 and torch.equal(used, copies.stored[name].bfloat16())
        torch.testing.assert_close(ours.state["square"][name], theirs.state[plain[name]]["exp_avg_sq"])
    assert ours.count == 6


def test_lion_follows_its_formula():
    run = run_of(kind="lion", learning_rate=3e-3)
    _, start, copies, ours = made(run)
    beta1, beta2, rate = run.optimizer.beta1, run.optimizer.beta2, make_schedule(run)
    values = {name: value.double() for name, value in start.items()}
    means = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(4):
        ours.add(gradients(step))
        ours.step(None)
        for name, gradient in gradients(step).items():
            sign = (beta1 * means[name] + (1 - beta1) * gradient.double()).sign()
            values[name] = values[name] * (1 - rate(step) * 0.3 * (name in MATRICES)) - rate(step) * sign
            means[name] = beta2 * means[name] + (1 - beta2) * gradient.double()
    for name, value in values.items():
        torch.testing.assert_close(copies.stored[name].double(), value, rtol=1e-6, atol=1e-6)


def test_sums_of_micro_batches_are_exact_and_what_has_no_gradient_has_none():
    _, _, _, ours = made(run_of(), accumulate=2)
    for step in (0, 2):  # the second batch must not see the first
        first, second = gradients(step), gradients(step + 1)
        del first["norm"]
        ours.add(first)
        ours.add(second)
        for name in SHAPES:
            wanted = second[name].float() + first[name].float() if name in first else second[name].float()
            assert ours.gradients[name].dtype == torch.float32 and torch.equal(ours.gradients[name], wanted)
        ours.skip()
    ours.add({"norm": gradients(9)["norm"]})
    assert all(bool(gradient.any()) == (name == "norm") for name, gradient in ours.gradients.items())
    assert ours.count == 2


def test_each_tensor_starts_where_kernels_read_at_full_speed():
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    flat = Flat(tensors, MATRICES)
    whole = torch.arange(flat.size)
    starts = {name: int(view.flatten()[0]) for name, view in flat.views(whole).items()}
    assert all(start % 128 == 0 for start in starts.values())
    assert {name for name, start in starts.items() if start < flat.border} == MATRICES
    assert sum(len(half) for half in flat.halves(whole)) == flat.size


def test_a_checkpoint_holds_each_number_once(tmp_path):
    kind, keys = FAMILIES["llama"]
    theirs(kind, **keys).save_pretrained(tmp_path / "from")
    sizes, losses = {}, {}
    for dtype in ("float32", "bfloat16"):
        run = make_run(tmp_path / "from", Layout({}), train={"compute_dtype": dtype})
        engine = make_engine(run)
        engine.train_step(batch(0))
        folder = tmp_path / dtype
        folder.mkdir()
        engine.save(folder)()
        sizes[dtype] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        again = make_engine(run)
        again.restore(folder)
        losses[dtype] = [[float(one.train_step(batch(n))["loss"]) for n in (1, 2, 3)] for one in (engine, again)]
        assert losses[dtype][0] == losses[dtype][1]  # the second comes of moments and count, too
    assert losses["float32"][0] != losses["bfloat16"][0]
    assert abs(sizes["bfloat16"] / sizes["float32"] - 1) < 0.01
