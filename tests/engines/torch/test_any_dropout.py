"""Models of `transformers` that are of none of Meshwright's families: what is random in them, and how they begin."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

from families import theirs
from helpers import run_values, write_corpus
from torch_jobs import BATCH, TIME, batch, make_engine

import meshwright as mw
from meshwright.errors import UserError
from meshwright.hub.any_model import changed, spec_from_hf

_SMALL = {"vocab_size": 97, "hidden_size": 32, "d_model": 32, "n_embd": 32, "word_embed_proj_dim": 32}
_LAYERS = {"ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "rate", "replaced"),
    [
        ("opt", 0.1, {"dropout": 0.0, "attention_dropout": 0.0}),
        ("xglm", 0.1, {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}),
        ("codegen", 0.0, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),  # not that of an unused head
        ("mpt", 0.0, {"attn_config": {"attn_pdrop": 0}, "resid_pdrop": 0.0, "emb_pdrop": 0.0}),
    ],
)
def test_rates_that_a_config_leaves_to_its_class_are_known_and_replaced(kind, rate, replaced):
    config = {"model_type": kind, **_SMALL}
    assert spec_from_hf(config).dropout == rate
    none = changed(config, dropout=0.0)
    assert none == {**config, **replaced}
    assert spec_from_hf(none).dropout == 0.0


def test_with_dropout_of_its_class_a_step_draws_the_same_masks_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", **_SMALL, **_LAYERS}))

    def step(remat: str = "none", **model: float) -> tuple[float, float]:
        train = {"batch_size": BATCH, "sequence_length": TIME, "remat": remat}
        values = {"engine": "torch", "data": {"train": "x"}, "model": {"config": f"hf:{tmp_path}", **model}}
        found = make_engine(mw.make_run({**values, "train": train})).train_step(batch(0))
        return float(found["loss"]), float(found["grad_norm"])

    first = step()
    assert step() == first
    assert step("full") == pytest.approx(first, rel=1e-5)
    assert step(dropout=0.0)[0] != pytest.approx(first[0], rel=1e-4)


def test_layers_left_out_at_random_are_refused():
    config = {"model_type": "opt", **_SMALL, "layerdrop": 0.0}
    assert changed(config, dropout=0.3)["layerdrop"] == 0.0
    with pytest.raises(UserError, match=r"layerdrop = 0.1: leaves out whole layers"):
        spec_from_hf({**config, "layerdrop": 0.1})


def test_a_class_without_a_random_start_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = theirs("openai-gpt", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "base")
    run = run_values(write_corpus(tmp_path / "texts"), engine="torch", schedule={"kind": "constant"})
    run["model"] = {"init": f"hf:{tmp_path / 'base'}", "dropout": 0.0}
    mw.train(mw.make_run({**run, "name": "whole"}))
    mw.train(mw.make_run({**run, "train": {**run["train"], "steps": 4}}))
    shutil.rmtree(tmp_path / "base")
    mw.train(mw.load_run("runs/tiny/run.toml", ["train.steps=12"]))
    one, other = (mw.open_run(f"runs/{name}").metrics()["loss"] for name in ("whole", "tiny"))
    assert len(one) == 12
    np.testing.assert_array_equal(one, other)
