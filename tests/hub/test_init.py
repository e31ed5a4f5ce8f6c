"""`model.init`: what a run takes from a checkpoint or another run, and what it can't."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from glass import CONFIG, glass_tensors
from helpers import write_corpus
from runs import all_parameters, started, still_run
from safetensors.numpy import save_file

import meshwright as mw
from meshwright.data.prepare import prepare
from meshwright.data.store import Split
from meshwright.errors import UserError
from meshwright.models.hf import hf_from_spec
from meshwright.models.spec import preset
from meshwright.trainer import resolve_spec


def section(init, **keys):
    return mw.make_run({"data": {"train": "x"}, "model": {"init": str(init), **keys}, "train": {"sequence_length": 16}})


def test_the_architecture_and_the_tokenizer_come_from_the_checkpoint(glass):
    run = section(f"hf:{glass}")
    assert (run.model.family, run.model.layers, run.model.ffn_width, run.model.vocab_size) == ("llama", 4, 341, 1024)
    assert run.tokenizer.kind == f"hf:{glass}"
    assert run.model.preset == ""


def test_the_run_files_of_the_docs_are_whole(glass, tmp_path):
    page = (Path(__file__).parents[2] / "docs/hugging-face.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"(?s)```toml\n(.*?)```", page)
    from_hub = tomllib.loads(first.replace("hf:models/SmolLM2-135M", f"hf:{glass}"))
    run = mw.make_run(from_hub)
    assert run.model.layers == 4
    (tmp_path / "run.toml").write_text(run.to_toml())
    run = mw.make_run({**from_hub, **tomllib.loads(second.replace("runs/base", str(tmp_path)))})
    assert (run.model.init, run.model.layers) == (str(tmp_path), 4)
    run = mw.make_run({**from_hub, **tomllib.loads(third)})
    assert (run.lora.rank, run.lora.scale) == (16, 2.0)


def test_keys_that_no_parameter_depends_on_may_be_changed(glass):
    spec = section(f"hf:{glass}", context_length=256, dropout=0.1, rope_theta=20_000.0, layers=4).model
    assert (spec.context_length, spec.dropout, spec.rope_theta) == (256, 0.1, 20_000.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", 3), ("width", 64), ("norm_eps", 1e-5), ("tied_embeddings", False), ("vocab_size", 2048)],
)
def test_keys_that_are_the_checkpoints_can_not(glass, key, value):
    with pytest.raises(UserError, match=rf"model\.{key} = {value}: the checkpoint .* leave it out"):
        section(f"hf:{glass}", **{key: value})


def test_a_preset_beside_must_be_the_same_model(glass):
    with pytest.raises(UserError, match=r"model\.\w+ = .*: the checkpoint"):
        section(f"hf:{glass}", preset="gpt2-tiny")


def test_a_preset_beside_changes_nothing(tmp_path):
    config = hf_from_spec(preset("llama-tiny").model_copy(update={"vocab_size": 300}))
    config |= {"rope_theta": 77_777.0, "rope_parameters": None, "max_position_embeddings": 640}
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone, beside = (section(f"hf:{tmp_path}", **key).model for key in ({}, {"preset": "llama-tiny"}))
    assert alone.spec == beside.spec
    assert (beside.rope_theta, beside.context_length) == (77_777.0, 640)
    assert (preset("llama-tiny").rope_theta, preset("llama-tiny").context_length) != (77_777.0, 640)


def test_a_checkpoint_without_its_tokenizer_is_refused(glass, tmp_path):
    shutil.copytree(glass, tmp_path / "glass")
    (tmp_path / "glass/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"model\.init = .*came without a tokenizer .*, or set tokenizer\.kind"):
        prepare(still_run(tmp_path, "none", f"hf:{tmp_path / 'glass'}"))
    bpe = {"kind": "bpe", "vocab_size": 300}
    assert prepare(still_run(tmp_path, "other", f"hf:{tmp_path / 'glass'}", tokenizer=bpe)).vocab_size == 300


def test_rates_of_dropout_that_differ_are_refused_unless_one_is_given(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.0}))
    with pytest.raises(UserError, match=r"\*_pdrop = .*'attn': 0\.0.*set model\.dropout"):
        section(f"hf:{tmp_path}")
    assert section(f"hf:{tmp_path}", dropout=0.2).model.dropout == 0.2


def test_a_vocabulary_may_lack_what_the_text_has_not(tmp_path):
    """Bytes and an end of text are 257: a table of 256 has no place for the end of text, which each has."""
    write_corpus(tmp_path / "texts")
    spec = preset("llama-tiny").model_copy(update={"vocab_size": 256})
    (tmp_path / "config.json").write_text(json.dumps(hf_from_spec(spec)))
    values = {"data": {"train": str(tmp_path / "texts"), "store": str(tmp_path / "store")}, "model": {}}
    values |= {"tokenizer": {"kind": "bytes"}, "train": {"sequence_length": 16}}
    values["data"]["validation"] = 0.2
    corpus = prepare(mw.make_run(values | {"model": {"preset": "llama-tiny"}}))
    run = mw.make_run(values | {"model": {"init": f"hf:{tmp_path}"}})
    with pytest.raises(UserError, match=r"model\.init = .*has a vocabulary of 256, .*the tokenizer's id 256; use the"):
        resolve_spec(run, corpus)
    with pytest.raises(UserError, match=r"vocabulary of 256, and the tokenizer of 257; prepare the text before"):
        resolve_spec(run, corpus, is_stored=False)
    for name in ("train", "validation"):
        corpus.stores[0]._splits[name] = Split(name, [np.array([7, 255, 8], np.uint16)], 255)
    assert resolve_spec(run, corpus).vocab_size == 256  # a tokenizer's largest id that no text has
    with pytest.raises(UserError, match=r"model\.vocab_size = 256: must be at least the tokenizer's 257; set it to"):
        resolve_spec(mw.make_run(values | {"model": {"preset": "llama-tiny", "vocab_size": 256}}), corpus)


def test_learned_positions_keep_their_length(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert section(f"hf:{tmp_path}").model.context_length == 64
    with pytest.raises(UserError, match=r"model\.context_length = 128"):
        section(f"hf:{tmp_path}", context_length=128)


def test_neither_preset_nor_checkpoint():
    with pytest.raises(UserError, match=r"model\.preset: missing"):
        mw.make_run({"data": {"train": "x"}, "model": {"layers": 2}})
    with pytest.raises(UserError, match=r"model\.init = 'nowhere': no such run directory"):
        section("nowhere")
    with pytest.raises(UserError, match=r"model\.init = 3"):
        mw.make_run({"data": {"train": "x"}, "model": {"init": 3}})


def test_a_resolved_run_file_needs_no_checkpoint(glass, tmp_path):
    shutil.copytree(glass, tmp_path / "glass")
    run = section(f"hf:{tmp_path / 'glass'}", dropout=0.1)
    (tmp_path / "run.toml").write_text(run.to_toml())
    shutil.rmtree(tmp_path / "glass")
    assert mw.load_run(tmp_path / "run.toml").model == run.model


def rope_buffer(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)


def lacking(tensors):
    del tensors["model.layers.2.self_attn.q_proj.weight"]


def more(tensors):
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.ones(128, np.float16)


def other_shape(tensors):
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((340, 128), np.float16)


def integers(tensors):
    tensors["model.norm.weight"] = np.ones(128, np.int32)


FAULTS = {
    r"lacks model\.layers\.2\.self_attn\.q_proj\.weight": lacking,
    r"holds model\.layers\.1\.self_attn\.q_proj\.bias, which the family llama has no use for": more,
    r"model\.layers\.3\.mlp\.up_proj\.weight is of shape \(340, 128\).*\(341, 128\)": other_shape,
    r"model\.norm\.weight is of type I32": integers,
}


def start(folder, change):
    tensors = glass_tensors()
    change(tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return started(section(f"hf:{folder}"))


@pytest.mark.parametrize("message", FAULTS)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, message):
    with pytest.raises(UserError, match=message):
        start(tmp_path, FAULTS[message])


def test_buffers_that_change_nothing_are_passed_over(tmp_path):
    engine = start(tmp_path, rope_buffer)
    embedding = engine.on_host().read("embedding", ())
    np.testing.assert_array_equal(embedding, glass_tensors()["model.embed_tokens.weight"].astype(np.float32))


TINY = {"preset": "llama-tiny", "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 48}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run to start from, whose evaluations use the average that schedule-free keeps, not what it trains."""
    folder = tmp_path_factory.mktemp("base")
    optimizer = {"kind": "schedule_free", "learning_rate": 0.03}
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    run = still_run(folder, "base", "random", model=TINY, optimizer=optimizer, tokenizer=tokenizer)
    return mw.train(run).run_dir


def test_a_run_starts_from_another_runs_parameters(base, tmp_path):
    run = still_run(tmp_path, "next", str(base), optimizer={"kind": "lion"}, schedule={"kind": "constant"})
    assert (run.tokenizer.kind, run.model.layers, run.model.kv_heads) == (f"hf:{base}/tokenizer", 2, 1)
    ours, theirs = all_parameters(mw.train(run).run_dir), all_parameters(base)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-6, atol=1e-7, err_msg=name)
    trained = mw.open_run(base).engine._state.params["embedding"]
    assert np.abs(theirs["embedding"] - trained).max() > 1e-4  # what it trains is something else
    again = mw.load_run(tmp_path / "next" / "run.toml", ["train.steps=3"])
    assert mw.train(again).step == 3  # goes on from its own checkpoint


def test_another_tokenizer_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"tokenizer \(fingerprint\).*\n.*tokenizer\.kind = 'hf:.*base/tokenizer'"):
        mw.train(still_run(tmp_path, "next", str(base), tokenizer={"kind": "bytes"}))


def test_a_run_without_checkpoints_is_no_start(base, tmp_path):
    shutil.copytree(base, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match="has no checkpoint that can be read"):
        mw.train(still_run(tmp_path, "next", str(tmp_path / "empty")))
