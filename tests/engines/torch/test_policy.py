"""Types, recomputation, update rules and what isn't finite, on one process; and attention against a plain one."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import torch
from families import theirs
from torch_jobs import FAMILIES, MORE, Layout, batch, make_engine, make_run, train

from meshwright.engines.torch import plan
from meshwright.engines.torch.attention import attention
from meshwright.engines.torch.build import skeleton
from meshwright.engines.torch.loss import cross_entropy_sum
from meshwright.engines.torch.plan import own


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    kind, keys = FAMILIES["llama"]
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs(kind, **keys).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint):
    return train(make_run(checkpoint, Layout({}, 2)))[1]


@pytest.mark.parametrize(("remat", "norms"), [("none", 1), ("full", 2), ("products", 2)])
def test_recomputation_changes_nothing_but_the_work(checkpoint, plain, remat, norms):
    engine = make_engine(make_run(checkpoint, Layout({}, 2), train={"remat": remat}))
    calls = []
    engine._placed.module.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    losses = [float(engine.train_step(batch(step))["loss"]) for step in range(3)]
    assert losses == plain["loss"][:3].tolist()
    assert len(calls) == 3 * 2 * norms  # steps, micro-batches


def test_routers_are_heard_once_where_experts_are_computed_again(tmp_path):
    kind, keys = MORE["mixtral"]
    theirs(kind, **keys).save_pretrained(tmp_path)
    found = [train(make_run(tmp_path, Layout({}, 2), train={"remat": remat}))[1]["loss"] for remat in ("none", "full")]
    np.testing.assert_array_equal(*found)
    spec = make_run(tmp_path, Layout({}, 2)).model.spec
    assert spec.experts and spec.balance_loss > 0


def test_a_buffer_of_two_modules_stays_one(checkpoint, monkeypatch):
    numbers = torch.arange(7.0)

    def sharing(spec):
        model = skeleton(spec)
        for layer in model.model.layers:
            layer.register_buffer("scale", numbers, persistent=False)
        return model

    monkeypatch.setattr(plan, "skeleton", sharing)
    first, second = make_engine(make_run(checkpoint, Layout({})))._placed.module.model.model.layers
    assert first.scale is second.scale
    assert torch.equal(first.scale, torch.arange(7.0))


def test_a_gradient_is_scaled_exactly_in_bfloat16():
    torch.manual_seed(0)
    x, kernel = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((64, 16), (32, 16)))
    targets, weights = torch.randint(32, (64,)), torch.ones(64)
    whole, scaled = (
        torch.autograd.grad(cross_entropy_sum(x, kernel, targets, weights, chunk=64) / by, (x, kernel))
        for by in (torch.tensor(1.0), torch.tensor(3000.0))
    )
    assert scaled[0].dtype == torch.bfloat16
    for one, other in zip(whole, scaled, strict=True):
        ratio = (one.double() / other.double()).nanmean()
        assert abs(ratio / 3000 - 1) < 3e-4  # a rounded 1 / 3000 is off by 1.4e-3


def test_bfloat16_is_computed_in_and_float32_is_kept(checkpoint, plain):
    engine, found = train(make_run(checkpoint, Layout({}, 2), train={"compute_dtype": "bfloat16"}))
    assert {own(parameter).dtype for parameter in engine._placed.parameters.values()} == {torch.float32}
    differences = np.abs(found["loss"] - plain["loss"])
    assert 1e-6 < differences.max() < 5e-3
    assert "bfloat16" in engine.description


@pytest.mark.parametrize("optimizer", [{"kind": "lion", "learning_rate": 3e-4}, {"kind": "adamw", "beta2": 0.999}])
def test_update_rules_are_those_of_the_jax_engine(checkpoint, optimizer):
    from meshwright.engines.jax.engine import JaxEngine

    run = make_run(checkpoint, Layout({}), optimizer=optimizer)
    jax = JaxEngine(run.model_copy(update={"engine": "jax"}), run.model.spec)
    found = train(run)[1]["loss"]
    np.testing.assert_allclose(found, [float(jax.train_step(batch(step))["loss"]) for step in range(5)], rtol=1e-4)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_step_that_is_not_finite_is_left_out_if_asked(checkpoint, policy):
    from meshwright.engines.jax.engine import JaxEngine

    run = make_run(checkpoint, Layout({}), train={"on_nonfinite": policy})
    engines = make_engine(run), JaxEngine(run.model_copy(update={"engine": "jax"}), run.model.spec)
    losses = []
    for step in range(4):
        one = batch(step)
        if step == 1:
            one = one._replace(weights_BT=one.weights_BT * np.float32(np.inf))
        losses.append([float(engine.train_step(one)["loss"]) for engine in engines])
    assert np.isfinite(losses[0]).all() and not np.isfinite(losses[1]).any()
    if policy == "skip":
        np.testing.assert_allclose(*np.array(losses[2:]).T, rtol=1e-4)
    assert engines[0].is_finite() == engines[1].is_finite() == (policy == "skip")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segmented", [False, True])
def test_attention_sees_what_it_may(softcap, window, segmented):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 7, 4) for heads in (4, 2, 2))
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2]]) if segmented else None
    more = {"sliding_window": window, "softcap": softcap, "segments_BT": segments}
    out, _ = attention(None, query, key, value, scaling=0.7, **more)
    for row in range(2):
        for head in range(4):
            for place in range(7):
                seen = [
                    other
                    for other in range(place + 1)
                    if (window is None or place - other < window)
                    and (segments is None or segments[row, place] == segments[row, other])
                ]
                scores = key[row, head // 2, seen] @ query[row, head, place] * 0.7
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                expected = scores.softmax(0) @ value[row, head // 2, seen]
                torch.testing.assert_close(out[row, place, head], expected)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [3, 100])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(softcap, chunk):
    torch.manual_seed(0)
    x, kernel = torch.randn(11, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    targets, weights = torch.randint(13, (11,)), (torch.arange(11) % 3 > 0).float()
    scores = x @ kernel.T
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    expected = (torch.nn.functional.cross_entropy(scores, targets, reduction="none") * weights).sum()
    found = cross_entropy_sum(x, kernel, targets, weights, chunk=chunk, softcap=softcap)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected / 7, (x, kernel))
    for ours, plain in zip(torch.autograd.grad(found / 7, (x, kernel)), wanted, strict=True):
        torch.testing.assert_close(ours, plain)
