"""The PyTorch engine's examples train as they stand, on their own meshes, but for the model's and the data's size."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pytest
from families import theirs
from helpers import WORDS, meshwright, write_corpus, write_run

import meshwright as mw

EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"

pytest.importorskip("transformers")

_ROTARY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHORT = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}
MODELS = {
    "qwen-wikitext": ("qwen2", {**_ROTARY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt2-rust": ("gpt2", _SHORT),
    "codegen-rust-lora": ("codegen", {**_SHORT, "n_ctx": 64, "rotary_dim": 4}),
    "dpo": ("qwen2", {**_ROTARY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
}
QLORA = "qwen-rust-qlora"
TINY = [
    *("tokenizer.kind=bytes", "train.sequence_length=64", "train.steps=2", "train.batch_size=4", "train.eval_every=2"),
    *("train.micro_batch_size=0", "train.eval_batches=1", "train.sample_every=0", "train.log_every=1"),
    *("schedule.warmup_steps=0", "data.validation=0.2", "checkpoint.every=0"),
]


def write_rust(folder: Path) -> Path:
    """Programs with a licence at their head, one twice."""
    folder.mkdir()
    for number in range(24):
        word = WORDS[number % len(WORDS)]
        text = (
            f'// Licensed under the MIT licence.\n\nfn {word}() -> u32 {{\n    println!("{word}");\n    {number}\n}}\n'
        )
        (folder / f"{number:02}.rs").write_text(text, encoding="utf-8")
    (folder / "twice.rs").write_text(text, encoding="utf-8")
    return folder


def write_pairs(path: Path) -> Path:
    """Pairs of answers; two texts of a template that is a line each are longer than the other examples' documents."""
    said = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": WORDS[n % 9]}] for n in range(24)]
    rows = [{"chosen": one, "rejected": [one[0], {**one[1], "content": "no"}], "score_chosen": 5.0} for one in said]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MODELS)
def test_an_example_trains_on_its_mesh(name, tmp_path, monkeypatch):
    kind, keys = MODELS[name]
    model = theirs(kind, **keys)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    texts, more = write_rust(tmp_path / "texts") if "rust" in name else write_corpus(tmp_path / "texts"), []
    if name == "dpo":  # bytes have no template of their own
        texts, more = write_pairs(tmp_path / "pairs.jsonl"), ["data.chat=chatml", "train.sequence_length=192"]
    path = EXAMPLES / f"{name}.toml"
    sources = [f"data.train={texts}", f"model.init=hf:{tmp_path / 'model'}"]
    done = meshwright("train", path, *TINY, *sources, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    mesh = tomllib.loads(path.read_text())["mesh"]
    shown = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    assert re.search(rf"\d x cpu, float32; {shown}\n", done.stdout), done.stdout
    opened = mw.open_run(tmp_path / "runs" / name)
    assert len(opened.metrics()["loss"]) == 2 and len(opened.evaluations()["val_loss"]) == 1
    manifest = opened.checkpoint.manifest
    assert manifest["step"] == 2
    assert (manifest["trained_parameters"] < manifest["parameters"]) == (name in ("codegen-rust-lora", "dpo"))
    if "rust" in name:
        monkeypatch.chdir(tmp_path)
        (store,) = mw.prepare(opened.run).stores
        splits = [store.split(part) for part in ("train", "validation")]
        found = [opened.tokenizer.decode(split.document(i)) for split in splits for i in range(split.document_count)]
        assert len(found) == 24 and all(text.startswith("fn ") for text in found)


def test_the_example_in_4_bits_trains_where_the_cpu_is_let(tmp_path, monkeypatch):
    kind, keys = MODELS["qwen-wikitext"]
    model = theirs(kind, **keys)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    sources = [f"data.train={write_rust(tmp_path / 'texts')}", f"model.init=hf:{tmp_path / 'model'}"]
    run = mw.load_run(EXAMPLES / f"{QLORA}.toml", [*TINY, *sources, f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(mw.UserError, match="QLoRA runs on CUDA only"):
        mw.train(run)
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("meshwright.engines.torch.plan.check_device", lambda device: None)
    opened = mw.open_run(mw.train(run).run_dir)
    assert len(opened.metrics()["loss"]) == 2 and len(opened.engine._placed.quantized) == 2 * 7


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == MODELS.keys() | {QLORA}


def test_gpt2_learns_rust_by_adapters_as_its_head_says(tmp_path):
    model = theirs("gpt2", **_SHORT)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    (added,) = re.findall(r"add (lora\S+ \S+) to", (EXAMPLES / "gpt2-rust.toml").read_text())
    sources = [f"data.train={write_rust(tmp_path / 'texts')}", f"model.init=hf:{tmp_path / 'model'}"]
    done = meshwright("train", EXAMPLES / "gpt2-rust.toml", *TINY, *sources, *added.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LoRA trains" in done.stdout


def write_vocabulary(folder: Path, texts: list[Path], size: int) -> None:
    """Files of a byte-pair vocabulary by the names that those of GPT-2 and CodeGen have."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    marks = ["<|endoftext|>"]
    tokenizer.train(list(map(str, texts)), vocab_size=size, special_tokens=marks, show_progress=False)
    assert tokenizer.get_vocab_size() == size
    tokenizer.save_model(str(folder))


@pytest.mark.slow
def test_codegen_as_the_hub_has_it_is_written_anew_as_the_head_says(tmp_path):
    """Pickled tensors in half precision, with masks of an older version, and the files of its tokenizer."""
    import torch
    from safetensors.torch import load_file

    texts, old = write_rust(tmp_path / "texts"), tmp_path / "old"
    kind, keys = MODELS["codegen-rust-lora"]
    model = theirs(kind, **keys).half()
    model.resize_token_embeddings(320)
    model.config.save_pretrained(old)
    masks = {f"transformer.h.{layer}.attn.causal_mask": torch.ones(1, 1, 64, 64).bool().tril() for layer in range(2)}
    torch.save(model.state_dict() | masks, old / "pytorch_model.bin")
    write_vocabulary(old, sorted(texts.iterdir()), 300)
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CodeGenTokenizer"}))
    path = EXAMPLES / "codegen-rust-lora.toml"
    commented = re.search(r"(?s)\n#   (python .*?)\nname = ", path.read_text())[1]
    command = commented.replace("\n# ", "\n")  # as an editor takes comments away
    for there, here in {"python": shlex.quote(sys.executable), "Salesforce/codegen-350M-mono": str(old)}.items():
        command = command.replace(there, here, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=120)
    found = load_file(tmp_path / "models/codegen-350M-mono/model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    settings = [setting for setting in TINY if setting != "tokenizer.kind=bytes"]
    done = meshwright("train", path, *settings, f"data.train={texts}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    opened = mw.open_run(tmp_path / "runs/codegen-rust-lora")
    assert len(opened.metrics()["loss"]) == 2
    assert opened.tokenizer.decode(opened.tokenizer.encode("fn the() {}")) == "fn the() {}"
    assert len(opened.tokenizer.encode("println")) < 4  # in bytes it is 7


# Real Rust


@pytest.fixture(scope="module")
def rust():
    folder = Path(os.environ.get("MESHWRIGHT_RUST", "/usr/share/cargo/registry"))
    if not any(folder.rglob("*.rs")):
        pytest.skip("needs Rust: apt-get install librust-tokio-dev, or a folder with it in MESHWRIGHT_RUST")
    return folder


SMALL = [
    *("train.sequence_length=64", "train.eval_every=100", "train.eval_batches=8", "train.sample_every=0"),
    *("train.log_every=1", "checkpoint.every=0"),
]


def write_base(folder: Path, kind: str, keys: dict) -> Path:
    """A small model that has read some Python, with a vocabulary of its own."""
    from transformers import AutoTokenizer

    python = Path(sysconfig.get_paths()["stdlib"])
    theirs(kind, **keys).config.save_pretrained(folder / "start")
    write_vocabulary(folder / "start", sorted(python.glob("*.py")), 512)
    name = {"gpt2": "GPT2Tokenizer", "codegen": "CodeGenTokenizer"}[kind]
    (folder / "start/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    AutoTokenizer.from_pretrained(folder / "start").save_pretrained(folder / "start")
    run = {
        "name": "python",
        "engine": "torch",
        "data": {"train": str(python / "*.py"), "validation": 0.1},
        "tokenizer": {"kind": f"hf:{folder / 'start'}"},
        "model": {"config": f"hf:{folder / 'start'}", "vocab_size": 512},
        "optimizer": {"learning_rate": 3e-3},
        "train": {"steps": 300, "batch_size": 16, "sequence_length": 64, "eval_every": 0, "sample_every": 0},
        "checkpoint": {"every": 0},
    }
    write_run(folder / "python.toml", run)
    done = meshwright("train", "python.toml", cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return mw.open_run(folder / "runs/python").export(folder / "model").path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["gpt2-rust", "codegen-rust-lora"])
def test_real_rust_is_learned(name, rust, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = write_base(tmp_path, *MODELS[name])
    more = [f"data.train={rust}", 'data.include=["*.rs"]', f"model.init=hf:{base}", "train.steps=300"]
    done = meshwright("train", EXAMPLES / f"{name}.toml", *SMALL, *more, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    opened = mw.open_run(tmp_path / "runs" / name)
    losses, held_out = opened.metrics()["loss"], opened.evaluations()["val_loss"].tolist()
    print(name, "loss", [round(float(part.mean()), 3) for part in np.split(losses, 6)], "held out", held_out)
    assert losses[-50:].mean() < losses[:50].mean() - 0.1
    assert held_out == sorted(held_out, reverse=True)
