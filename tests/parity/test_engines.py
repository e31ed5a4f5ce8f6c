"""The same Hugging Face checkpoint and run file in JAX and in PyTorch: the same losses, gradients and logits.

Dropout is off: the engines draw its random numbers differently. All is float32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "hub"))
pytest.importorskip("transformers")

from glass import ENGLISH, write_glass

import meshwright as mw

_ROTARY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {**_ROTARY, "tie_word_embeddings": False},
    "qwen2": {**_ROTARY, "tie_word_embeddings": True},
    "mixtral": {**_ROTARY, "num_local_experts": 4},
    "gemma2": {
        **_ROTARY,
        "head_dim": 12,
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "final_logit_softcapping": 5.0,
    },
}
STEPS = 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A random checkpoint of each family, and a real one."""
    import families

    folder = tmp_path_factory.mktemp("checkpoints")
    write_glass(folder / "glass")
    for name, keys in FAMILIES.items():
        model = families.theirs(name, **keys)
        model.resize_token_embeddings(260)
        model.config.vocab_size = 260
        model.save_pretrained(folder / name)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(24):
        (texts / f"{number:02}.txt").write_text(f"{number}\n{ENGLISH[number * 20 :]}", encoding="utf-8")
    return folder


def make_run(folder: Path, family: str, engine: str, **sections) -> mw.Run:
    values: dict = {
        "name": f"{family}-{engine}",
        "engine": engine,
        "run_dir": str(folder / f"{family}-{engine}"),
        "data": {"train": str(folder / "texts"), "validation": 0.3, "store": str(folder / "stores" / family)},
        "model": {"init": f"hf:{folder / family}", "dropout": 0.0},
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.7, "weight_decay": 0.2},
        "schedule": {"warmup_steps": 5},
        "train": {"steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "sequence_length": 48, "log_every": 1},
        "checkpoint": {"every": 0},
    }
    values["train"] |= {"eval_every": STEPS, "eval_batches": 3, "sample_every": 0}
    if family != "glass":
        values["tokenizer"] = {"kind": "bytes"}
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section} if isinstance(section, dict) else section
    return mw.make_run(values)


@pytest.mark.parametrize("family", ["glass", *FAMILIES])
def test_both_engines_train_alike(checkpoints, family):
    outcomes, opened = {}, {}
    for engine in ("jax", "torch"):
        outcomes[engine] = mw.train(make_run(checkpoints, family, engine))
        opened[engine] = mw.open_run(outcomes[engine].run_dir)
    table = {engine: one.metrics() for engine, one in opened.items()}
    assert len(table["torch"]["loss"]) == STEPS
    for key in ("loss", "grad_norm", "tokens", "learning_rate"):
        np.testing.assert_allclose(table["torch"][key], table["jax"][key], atol=1e-4, rtol=0, err_msg=key)
    losses = table["torch"]["loss"]
    assert losses[-1] < losses[0] - 0.02 and (table["torch"]["grad_norm"] > 0.7).any()  # it learned, and was clipped
    for key, value in outcomes["jax"].evaluation.items():
        assert outcomes["torch"].evaluation[key] == pytest.approx(value, rel=1e-4), key
    tokens = np.random.default_rng(0).integers(0, 260, (2, 40))
    ours, theirs = (opened[engine].engine.logits(tokens) for engine in ("jax", "torch"))
    np.testing.assert_allclose(theirs, ours, atol=1e-3, rtol=0)
    assert type(opened["torch"].engine).__module__ != type(opened["jax"].engine).__module__
    texts = [one.generate(["It was", "He"], max_tokens=12, temperature=0.0) for one in opened.values()]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["glass", *FAMILIES])
def test_each_gradient_of_the_first_step_is_the_same(checkpoints, family):
    import jax
    import optax
    from torch_jobs import keep_gradients

    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine
    from meshwright.engines.torch.engine import TorchEngine
    from meshwright.engines.torch.names import write_tensor

    run = make_run(checkpoints, family, "torch")
    random = np.random.default_rng(0)
    tokens = random.integers(0, 260, (4, 49)).astype(np.int32)
    weights = (np.arange(48) < random.integers(4, 49, (4, 1))).astype(np.float32)
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), weights)
    torches = TorchEngine(run, run.model.spec)
    theirs = keep_gradients(torches)
    norm = float(torches.train_step(batch)["grad_norm"])
    keep = optax.GradientTransformation(
        lambda params: params, lambda gradients, state, params=None: (gradients, gradients)
    )
    ours = JaxEngine(make_run(checkpoints, family, "jax"), run.model.spec, optimizer=keep)
    assert float(ours.train_step(batch)["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    leaves = jax.tree_util.tree_flatten_with_path(ours._state.optimizer)[0]
    gradients = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    names = torches._placed.names
    assert len(theirs) == len(names.tensors) > 15
    for name, gradient in theirs.items():
        made = write_tensor(names, name, lambda path, place: gradients[path][place])
        zero = write_tensor(names, name, lambda path, place: np.zeros_like(gradients[path][place]))
        scale = np.linalg.norm(made - zero)
        if name.endswith("c_attn.bias"):  # of the keys it is rounding alone
            made[48:96] = gradient[48:96]
        assert np.linalg.norm(gradient - (made - zero)) < 1e-4 * scale, name
        assert scale > 0


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_packed_documents_keep_to_themselves_in_both(checkpoints, family):
    texts = checkpoints / "short"
    for number in range(0 if texts.exists() else 60):
        texts.mkdir(exist_ok=True)
        (texts / f"{number:02}.txt").write_text(ENGLISH[number * 9 : number * 9 + 20 + number % 7], encoding="utf-8")
    found = {}
    for engine, masked in (("jax", True), ("torch", True), ("torch", False)):
        name = f"packed-{family}-{engine}-{masked}"
        data = {"train": str(texts), "packing": "packed", "document_mask": masked, "store": str(checkpoints / "packed")}
        run = make_run(checkpoints, family, engine, name=name, run_dir=str(checkpoints / name), data=data)
        found[engine, masked] = mw.open_run(mw.train(run).run_dir).metrics()["loss"]
    np.testing.assert_allclose(found["torch", True], found["jax", True], atol=1e-4, rtol=0)
    assert np.abs(found["torch", False] - found["torch", True]).max() > 1e-3  # the mask matters


def test_answers_alone_are_learned_in_both(checkpoints):
    chats = checkpoints / "chats.jsonl"
    turns = [(f"What follows {n}?", f"{n + 1} does.") for n in range(60)]
    roles = ("user", "assistant")
    chats.write_text(
        "".join(
            json.dumps({"messages": [{"role": r, "content": text} for r, text in zip(roles, turn, strict=True)]}) + "\n"
            for turn in turns
        )
    )
    template = checkpoints / "chat.jinja"  # shorter than ChatML
    answer = "{% generation %}{{ m.content }}{% endgeneration %}"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    data = {"train": str(chats), "packing": "padded", "store": str(checkpoints / "chats"), "chat": str(template)}
    tables = {}
    for engine in ("jax", "torch"):
        name = f"chat-{engine}"
        run = make_run(checkpoints, "qwen2", engine, name=name, run_dir=str(checkpoints / name), data=data)
        tables[engine] = mw.open_run(mw.train(run).run_dir).metrics()
    for key in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(tables["torch"][key], tables["jax"][key], atol=1e-4, rtol=0)
    counted = np.diff(tables["torch"]["tokens"])
    assert counted.min() > 0 and counted.max() < 0.6 * 4 * 48  # questions and padding don't count
