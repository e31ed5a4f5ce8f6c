"""DPO of the PyTorch engine, beside a plain loop of `transformers`; on other meshes, killed, and what it refuses."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import torch
from families import theirs
from helpers import kill, meshwright, start_meshwright, wait_for, write_run
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.data.loader import TrainData, eval_batches
from meshwright.engines.flops import training_flops
from meshwright.engines.torch.engine import TorchEngine
from meshwright.engines.torch.lora import adapters_off
from meshwright.engines.torch.loss import cross_entropy_sum
from meshwright.engines.torch.plan import own
from meshwright.errors import UserError

VOCAB, TIME, BETA, SCALE = 257, 160, 0.3, 2.0
_ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
_SHORT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MODELS = {
    "llama": ("llama", _ROTARY),
    "gpt2": ("gpt2", _SHORT),
    "gpt_neox": ("gpt_neox", {**_ROTARY, "tie_word_embeddings": False}),  # of none of our families
}
ROWS = [
    {"prompt": f"{n}?", "chosen": f"{'yes ' * (1 + n % 4)}{n}", "rejected": f"no{'!' * (1 + 3 * n % 7)}"}
    for n in range(48)
]


def text_of(prompt: str, answer: str) -> tuple[str, str]:
    """What goes before an answer, and the answer with the mark that ends it."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    for name, (kind, keys) in MODELS.items():
        model = theirs(kind, **keys)
        model.resize_token_embeddings(VOCAB)
        model.save_pretrained(folder / name)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return folder


def dpo_run(folder, name, init="llama", **sections):
    values = {
        "name": name,
        "run_dir": str(folder / "runs" / name),
        "engine": "torch",
        "data": {"train": str(folder / "pairs.jsonl"), "validation": 0.2, "packing": "pairs", "chat": "chatml"},
        "tokenizer": {"kind": "bytes"},
        "model": {"init": f"hf:{folder / init}", "dropout": 0.0},
        "lora": {"rank": 4, "alpha": 4 * SCALE},
        "dpo": {"beta": BETA},
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.5},
        "schedule": {"kind": "constant"},
        "train": {"steps": 6, "batch_size": 4, "sequence_length": TIME, "log_every": 1, "sample_every": 0},
        "checkpoint": {"every": 2, "keep": 9},
    }
    values["data"]["store"] = str(folder / "store")
    values["train"] |= {"eval_every": 3, "eval_batches": 20}
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section}
    return mw.make_run(values)


def tried(run):
    """The run's engine, and the batches of its steps."""
    return TorchEngine(run, run.model.spec), TrainData(mw.prepare(run), run)


def moved(engine, seed=0):
    """Give adapters that aren't zero, so that model and reference differ."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in engine._placed.parameters.items():
        if name.endswith("lora_b"):
            own(parameter).copy_(0.05 * torch.randn(parameter.shape, generator=random))
    engine._placed.changed()


class Plain:
    """A model of `transformers` with adapters by hooks, and the one it started from; a text at a time, unpadded."""

    def __init__(self, folder, engine):
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            for _ in range(2)
        )
        self.adapters = {name: own(p).clone().requires_grad_() for name, p in engine._placed.parameters.items()}
        for model in (self.policy, self.reference):
            model.requires_grad_(False)
        for name in [name.removesuffix(".lora_a") for name in self.adapters if name.endswith("lora_a")]:
            a, b = self.adapters[f"{name}.lora_a"], self.adapters[f"{name}.lora_b"]

            def add(_module, arguments, out, a=a, b=b):
                return out + SCALE * (arguments[0] @ a.T @ b.T)

            self.policy.get_submodule(name).register_forward_hook(add)

    def margins(self, rows):
        """Of each row `beta` times how much more the policy prefers the chosen text than the reference does."""
        found = []
        for row in rows:
            chosen, rejected = (
                self.log_probability(self.policy, row["prompt"], row[key])
                - self.log_probability(self.reference, row["prompt"], row[key]).detach()
                for key in ("chosen", "rejected")
            )
            found.append(BETA * (chosen - rejected))
        return torch.stack(found)

    def log_probability(self, model, prompt, answer):
        before, said = text_of(prompt, answer)
        tokens = torch.tensor([*f"{before}{said}\n".encode(), 256])
        counts = torch.tensor([False] * len(before) + [True] * len(said) + [False, True])
        scores = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        return scores[:-1].gather(1, tokens[1:, None])[:, 0][counts[1:]].sum()


def rows_of(batch):
    """The rows that a batch was made of, found by their chosen texts."""
    by_text = {"".join(text_of(row["prompt"], row["chosen"])): row for row in ROWS}
    rows = zip(batch.inputs_BT, batch.segments_BT, strict=True)
    return [by_text[bytes(inputs[segments == 1].tolist()).decode().rstrip()] for inputs, segments in rows]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_step_is_that_of_two_plain_passes(folder, name, fresh):
    run = dpo_run(folder, "step", name, optimizer={"clip_norm": 0.0}, train={"micro_batch_size": 2})
    engine, data = tried(run)
    if not fresh:
        moved(engine)
    plain, gradients = Plain(folder / name, engine), keep_gradients_of(engine)
    batch = data.batch(0)
    values = {key: float(value) for key, value in engine.train_step(batch).items()}
    margins = plain.margins(rows_of(batch))
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["reward_margin"] == pytest.approx(margins.mean().item(), rel=1e-4, abs=1e-6)
    assert values["tokens"] == batch.weights_BT.sum()
    if fresh:
        assert values["loss"] == pytest.approx(math.log(2), rel=1e-6)
    else:
        assert abs(values["loss"] - math.log(2)) > 1e-2
        assert values["reward_accuracy"] == (margins > 0).float().mean()
    assert len(gradients) == len(plain.adapters) > 10
    for adapter, parameter in plain.adapters.items():
        wanted = parameter.grad
        assert (gradients[adapter] - wanted).norm() <= 1e-4 * wanted.norm() + 1e-9, adapter
        assert wanted.any() == (not fresh or adapter.endswith("lora_b"))


def keep_gradients_of(engine):
    kept, update = {}, engine._optimizer.step

    def step(shrink):
        gradients = engine._optimizer.gradients
        kept.update({name: part.clone() if shrink is None else part * shrink for name, part in gradients.items()})
        update(shrink)

    engine._optimizer.step = step
    return kept


def test_ten_steps_are_those_of_a_plain_loop_and_learn(folder):
    run = dpo_run(folder, "loop", train={"steps": 10})
    engine, data = tried(run)
    plain = Plain(folder / "llama", engine)
    decay = run.optimizer.weight_decay
    optimizer = torch.optim.AdamW(plain.adapters.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    found, wanted = [], []
    for step in range(10):
        batch = data.batch(step)
        values = engine.train_step(batch)
        found.append([float(values[key]) for key in ("loss", "reward_margin", "reward_accuracy")])
        margins = plain.margins(rows_of(batch))
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.adapters.values(), 0.5)
        optimizer.step()
        wanted.append([loss.item(), margins.mean().item(), (margins > 0).float().mean().item()])
    found, wanted = np.array(found), np.array(wanted)
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=1e-5)
    np.testing.assert_allclose(found[:, 1], wanted[:, 1], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found[1:, 2], wanted[1:, 2])
    assert found[0, 2] <= 0.5 and found[-1, 2] == 1.0
    assert found[-1, 0] < 0.8 * found[0, 0] and found[-1, 1] > 0.1


def test_texts_swapped_give_another_loss(folder):
    engine, data = tried(dpo_run(folder, "swapped"))
    moved(engine)
    batch = data.batch(0)
    swapped = batch._replace(segments_BT=np.where(batch.segments_BT > 0, 3 - batch.segments_BT, 0))
    (one, count), (other, _) = (map(float, engine.eval_step(each)) for each in (batch, swapped))
    assert count == 4 and abs(one - other) > 1e-2
    margin = float(engine.train_step(batch)["reward_margin"])
    assert margin != 0 and np.log1p(np.exp(-margin)) == pytest.approx(one / 4, abs=0.05)
    assert one - other == pytest.approx(-4 * margin, rel=1e-4)


def test_an_evaluation_is_the_mean_over_pairs_and_says_just_that(folder):
    run = dpo_run(folder, "evaluated")
    outcome = mw.train(run)
    assert outcome.evaluation.keys() == {"step", "val_loss"}
    opened = mw.open_run(outcome.run_dir)
    plain = Plain(folder / "llama", opened.engine)
    rows = [row for batch in eval_batches(mw.prepare(run), run) for row in rows_of(real(batch))]
    assert len(rows) % 4 and len(rows) > 4  # the last batch is filled up
    losses = -torch.nn.functional.logsigmoid(plain.margins(rows))
    assert outcome.evaluation["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert opened.evaluate()["val_loss"] == pytest.approx(outcome.evaluation["val_loss"], rel=1e-6)
    metrics, evaluations = opened.metrics(), opened.evaluations()
    assert {"loss", "reward_margin", "reward_accuracy", "grad_norm"} <= metrics.keys()
    assert "val_perplexity" not in evaluations and evaluations["val_loss"][-1] < math.log(2)
    assert "Losses are of pairs (DPO)" in (outcome.run_dir / "report.html").read_text()


def real(batch):
    return batch._make(part[batch.weights_BT.any(axis=1)] for part in batch)


@pytest.fixture(scope="module")
def trained(folder):
    return mw.open_run(mw.train(dpo_run(folder, "one")).run_dir)


@pytest.mark.parametrize("mesh", ["data", "fsdp", "accumulation"])
def test_a_mesh_trains_as_one_process_does(folder, trained, mesh):
    sections = {"train": {"micro_batch_size": 2}}
    if mesh != "accumulation":
        sections |= {"launch": {"kind": "processes", "workers": 2}, "mesh": {"data": 1, mesh: 2}}
    run = dpo_run(folder, mesh, **sections)
    if mesh == "accumulation":
        mw.train(run)
    else:
        write_run(folder / f"{mesh}.toml", run.model_dump(exclude_none=True))
        done = meshwright("train", f"{mesh}.toml", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    other = mw.open_run(run.directory)
    one, many = trained.metrics(), other.metrics()
    for key in ("loss", "grad_norm", "tokens", "reward_accuracy"):
        np.testing.assert_allclose(many[key], one[key], rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(many["reward_margin"], one["reward_margin"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other.evaluations()["val_loss"], trained.evaluations()["val_loss"], rtol=1e-5)
    assert one["loss"][-1] < 0.9 * one["loss"][0]
    ours, theirs = (opened.engine._placed.parameters for opened in (trained, other))
    for name, parameter in ours.items():
        difference = (own(theirs[name]) - own(parameter)).norm()
        assert difference < 1e-4 * own(parameter).norm(), name


def test_killed_it_goes_on_bit_for_bit(folder, trained):
    run = dpo_run(folder, "killed")
    write_run(folder / "killed.toml", run.model_dump(exclude_none=True))
    process = start_meshwright("train", "killed.toml", cwd=folder)
    try:
        wait_for(lambda: (run.directory / "checkpoints/step_00000002/manifest.json").is_file(), process)
    finally:
        kill(process)
    assert not (run.directory / "checkpoints/step_00000006/manifest.json").is_file()
    again = mw.open_run(mw.train(run).run_dir)
    for key in ("loss", "grad_norm", "reward_margin"):
        np.testing.assert_array_equal(again.metrics()[key], trained.metrics()[key])
    with pytest.raises(UserError, match=r"dpo.beta = 0.5; the checkpoint was made with 0.3"):
        mw.train(run.model_copy(update={"dpo": run.dpo.model_copy(update={"beta": 0.5})}))


def test_an_export_of_the_adapters_is_proven(trained, tmp_path):
    pytest.importorskip("peft")
    alone = trained.export(tmp_path / "adapters", adapter=True)
    assert any("and peft" in line for line in alone.proof)
    assert "validation loss (DPO, a pair)" in (tmp_path / "adapters/README.md").read_text()


@pytest.mark.parametrize("remat", ["full", "products"])
def test_what_is_computed_again_has_adapters(folder, remat):
    losses = []
    for kind in ("none", remat):
        engine, data = tried(dpo_run(folder, "again", train={"remat": kind}))
        losses.append([float(engine.train_step(data.batch(step))["loss"]) for step in range(3)])
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_bfloat16_is_computed_in_and_float32_is_kept(folder):
    losses = []
    for kind in ("float32", "bfloat16"):
        engine, data = tried(dpo_run(folder, kind, train={"compute_dtype": kind, "micro_batch_size": 2}))
        losses.append([float(engine.train_step(data.batch(step))["loss"]) for step in range(4)])
    assert {own(parameter).dtype for parameter in engine._placed.parameters.values()} == {torch.float32}
    assert losses[1][0] == pytest.approx(math.log(2), rel=1e-6)
    differences = np.abs(np.subtract(*losses))
    assert 1e-6 < differences.max() < 2e-2 and losses[1][3] < losses[1][0] - 0.05


def test_dropout_is_the_policys_alone(folder):
    engine, data = tried(dpo_run(folder, "dropout", "gpt2", model={"dropout": 0.2}))
    batch = data.batch(0)
    total, pairs = map(float, engine.eval_step(batch))
    assert total / pairs == pytest.approx(math.log(2), rel=1e-6)  # without it, and both alike
    seen, forward = [], engine._placed.module.row_losses

    def watched(rows):
        seen.append((engine._placed.module.training, torch.is_grad_enabled()))
        return forward(rows)

    engine._placed.module.row_losses = watched
    loss = float(engine.train_step(batch)["loss"])
    assert seen == [(False, False), (True, True)] and abs(loss - math.log(2)) > 1e-4
    assert engine._placed.module.training


def test_adapters_are_on_again_whatever_happens(folder):
    engine, _ = tried(dpo_run(folder, "switch"))
    moved(engine)
    module, tokens = engine._placed.module, torch.arange(8)[None]
    with torch.no_grad():
        adapted = module(module.scores, tokens)
        with pytest.raises(RuntimeError), adapters_off(module.model):
            base = module(module.scores, tokens)
            raise RuntimeError
        assert torch.equal(module(module.scores, tokens), adapted) and (adapted - base).abs().max() > 1e-2
        plain = Plain(folder / "llama", engine).reference(tokens).logits
    torch.testing.assert_close(base, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100])
def test_sums_of_parts_have_gradients_of_their_own(chunk):
    torch.manual_seed(0)
    x, kernel = torch.randn(12, 8, requires_grad=True), torch.randn(13, 8)
    targets, weights, slopes = torch.randint(13, (12,)), torch.randn(12), torch.tensor([2.0, -1.0, 0.5])
    each = torch.nn.functional.cross_entropy(x @ kernel.T, targets, reduction="none") * weights
    expected = each.view(3, 4).sum(1)
    found = cross_entropy_sum(x, kernel, targets, weights, chunk=chunk, parts=3)
    torch.testing.assert_close(found, expected)
    wanted, ours = (torch.autograd.grad(sums @ slopes, x)[0] for sums in (expected, found))
    torch.testing.assert_close(ours, wanted)
    with pytest.raises(ValueError, match="no gradient for the head"):
        cross_entropy_sum(x, kernel.requires_grad_(), targets, weights, chunk=chunk, parts=3)


def test_the_reference_is_counted_in_the_operations():
    spec = mw.make_run({"data": {"train": "x"}, "model": {"preset": "llama-tiny", "vocab_size": VOCAB}}).model.spec
    parameters, tokens, adapters = 1_000_000, 64, 5_000
    plain, both = (training_flops(spec, parameters, tokens, adapters, reference=one) for one in (False, True))
    forward = 2 * (parameters - (0 if spec.tied_embeddings else VOCAB * spec.width))
    assert both - plain == forward + 4 * spec.layers * spec.heads * spec.head_width * tokens


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"mesh": {"tensor": 2, "data": 1}}, "mesh.tensor = 2: doesn't cut adapters; raise mesh.fsdp"),
        ({"model": {"preset": "moe-tiny"}}, "model.experts = 4: mixtures of experts.*choose another model"),
    ],
)
def test_what_is_not_there_is_named(sections, said):
    values = {"engine": "torch", "data": {"train": "x", "packing": "pairs", "chat": "chatml"}, "lora": {"rank": 2}}
    model = {"preset": "llama-tiny", **sections.pop("model", {})}
    spec = mw.make_run({"data": {"train": "x"}, "model": {**model, "vocab_size": VOCAB}}).model.spec
    model |= {**spec.model_dump(), "init": "hf:nowhere"}
    run = mw.make_run({**values, "model": model, **sections})
    with pytest.raises(UserError, match=said) as raised:
        TorchEngine(run, run.model.spec)
    assert "\n" not in str(raised.value)


def test_a_model_that_does_not_keep_the_texts_apart_is_refused(folder):
    model = theirs("bloom", hidden_size=32, n_layer=2, n_head=4)
    model.resize_token_embeddings(VOCAB)
    model.save_pretrained(folder / "bloom")
    with pytest.raises(
        UserError, match=r'packing = "pairs": models of model_type \'bloom\' don.t keep .* choose another'
    ):
        tried(dpo_run(folder, "bloom", "bloom"))
