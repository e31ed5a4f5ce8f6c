"""The PyTorch engine's examples train as they stand, on their own meshes, but for the model's and the data's size."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from families import theirs
from helpers import WORDS, meshwright, write_corpus

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


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == MODELS.keys()


def test_gpt2_learns_rust_by_adapters_as_its_head_says(tmp_path):
    model = theirs("gpt2", **_SHORT)
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    (added,) = re.findall(r"add (lora\S+ \S+) to", (EXAMPLES / "gpt2-rust.toml").read_text())
    sources = [f"data.train={write_rust(tmp_path / 'texts')}", f"model.init=hf:{tmp_path / 'model'}"]
    done = meshwright("train", EXAMPLES / "gpt2-rust.toml", *TINY, *sources, *added.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LoRA trains" in done.stdout
