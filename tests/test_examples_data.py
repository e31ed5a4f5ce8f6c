"""The examples that read datasets, each trained on a small local dataset of the same schema."""

import json
import tomllib
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers import WORDS

import meshwright as mw
from meshwright.api import prepare, show_data
from meshwright.config import load_run

EXAMPLES = Path(__file__).parent.parent / "examples"

SENTENCES = [" ".join(WORDS[number % 5 : number % 5 + 9]) + f", {number} times.\n" for number in range(60)]
LICENCE = "// Copyright 2020 The Authors.\n// Licensed under the MIT licence.\n\n"

TINY = [
    *("tokenizer.kind=bytes", "model.preset=llama-tiny", "model.layers=1", "model.width=32", "model.heads=2"),
    *("model.ffn_width=48", "model.context_length=96", "model.dropout=0.0", "train.sequence_length=96"),
    *("train.steps=3", "train.batch_size=4", "train.micro_batch_size=0", "train.log_every=1", "train.eval_every=3"),
    *("train.eval_batches=1", "train.sample_every=0", "schedule.warmup_steps=0", "schedule.decay_steps=0"),
    "checkpoint.every=0",
]


def write_rows(path: Path, columns: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_configs(folder: Path, configs: dict[str, dict[str, str]]) -> None:
    """The head of a dataset card that says which files a config's splits are."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configs.items()
    ]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': listed})}\n---\n", encoding="utf-8")


def openwebtext(folder: Path) -> list[str]:
    write_rows(folder / "plain_text" / "train" / "0000.parquet", {"text": SENTENCES})
    return SENTENCES


def tinystories(folder: Path) -> list[str]:
    write_rows(folder / "data" / "train-00000-of-00001.parquet", {"text": SENTENCES})
    write_rows(folder / "data" / "validation-00000-of-00001.parquet", {"text": ["Once upon a time.\n"] * 9})
    return SENTENCES


def fineweb_edu(folder: Path) -> list[str]:
    many = len(SENTENCES)
    columns: dict[str, list] = {"text": SENTENCES, "id": [f"<urn:uuid:{number}>" for number in range(many)]}
    columns |= {name: ["x"] * many for name in ("dump", "url", "file_path", "language")}
    columns |= {name: [0.9] * many for name in ("language_score", "score")}
    columns |= {name: [3] * many for name in ("token_count", "int_score")}
    write_rows(folder / "sample" / "10BT" / "000_00000.parquet", columns)
    write_rows(folder / "data" / "all.parquet", {**columns, "text": ["not of the sample"] * many})
    write_configs(folder, {"default": {"train": "data/*"}, "sample-10BT": {"train": "sample/10BT/*"}})
    return SENTENCES


def wikitext(folder: Path) -> list[str]:
    config = folder / "wikitext-103-raw-v1"
    lines = [line for sentence in SENTENCES for line in ("", f" {sentence}")]
    write_rows(config / "train-00000-of-00002.parquet", {"text": ["", " = A title = \n"]})
    write_rows(config / "train-00001-of-00002.parquet", {"text": lines})
    for split in ("test", "validation"):
        write_rows(config / f"{split}-00000-of-00001.parquet", {"text": ["", " = Held out = \n"] * 12})
    write_configs(
        folder,
        {config.name: {split: f"{config.name}/{split}-*" for split in ("train", "test", "validation")}},
    )
    return [" = A title = \n", *(line for line in lines if line)]


def the_stack_smol_rust(folder: Path) -> list[str]:
    programs = [f'fn main() {{\n    println!("{sentence.strip()}");\n}}\n' for sentence in SENTENCES]
    many = len(programs)
    columns: dict[str, list] = {"content": [LICENCE + program for program in programs]}
    columns |= {"avg_line_length": [20.5] * many, "max_line_length": [80] * many, "alphanum_fraction": [0.7] * many}
    columns |= {"licenses": [["MIT"]] * many, "repository_name": ["a/b"] * many, "path": ["src/main.rs"] * many}
    columns |= {"size": [99] * many, "lang": ["Rust"] * many}
    write_rows(folder / "data" / "rust" / "data.json", columns)
    write_rows(folder / "data" / "python" / "data.json", {**columns, "content": ["not Rust"] * many})
    return programs


def chat(folder: Path) -> list[str]:
    def conversations(texts: list[str]) -> list[list[dict[str, str]]]:
        return [[{"content": "Go on.", "role": "user"}, {"content": text, "role": "assistant"}] for text in texts]

    for split, texts in {"train": SENTENCES, "test": ["Held out."] * 5}.items():
        rows = {"messages": conversations(texts), "source": ["x"] * len(texts)}
        write_rows(folder / "data" / "all" / f"{split}-00000-of-00001.parquet", rows)
    write_configs(folder, {"all": {split: f"data/all/{split}-*" for split in ("train", "test")}})
    question = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    return [f"{question}{text}<|im_end|>\n" for text in SENTENCES]


DATASETS = {
    "openwebtext": openwebtext,
    "tinystories": tinystories,
    "fineweb-edu": fineweb_edu,
    "wikitext": wikitext,
    "the-stack-smol-rust": the_stack_smol_rust,
    "chat": chat,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def local(name: str, folder: Path) -> tuple[mw.Run, list[str]]:
    """A run of an example in which the dataset's address alone is another, and the sizes; and its texts."""
    texts = DATASETS[name](folder)
    path = EXAMPLES / f"{name}.toml"
    sources = {key: tomllib.loads(path.read_text())["data"][key] for key in ("train", "validation")}
    overrides = [
        f"data.{key}={source.replace(address_of(source), str(folder))}"
        for key, source in sources.items()
        if isinstance(source, str)
    ]
    assert overrides
    if not isinstance(sources["validation"], str):
        overrides.append("data.validation=0.2")  # of so few documents, the example's share may be none
    return load_run(path, [*overrides, *TINY]), texts


def address_of(source: str) -> str:
    return source.removeprefix("hf:").split(":")[0]


@pytest.mark.parametrize("name", DATASETS)
def test_an_example_trains_on_a_dataset_of_its_schema(name, tmp_path):
    run, texts = local(name, tmp_path / "dataset")
    store, tokenizer = prepare(run).stores[0], prepare(run).tokenizer()
    training = store.split("train")
    found = [tokenizer.decode(training.document(i)) for i in range(training.document_count)]
    if isinstance(run.data.validation, str):
        assert found == texts and 0 < store.split("validation").document_count < 15
    else:
        assert found == [text for text in texts if text in found] and len(found) > 30
        assert len(found) + store.split("validation").document_count == len(texts)
    outcome = mw.train(run)
    assert outcome.step == 3 and outcome.evaluation["val_loss"] > 0
    assert mw.open_run(outcome.run_dir).metrics()["loss"].shape == (3,)
    (example,) = show_data(run, count=1).examples
    shown = [piece.text for part in example.parts for piece in part.pieces if not piece.special]
    assert sum(map(len, shown)) > 30
    assert all(any(piece in text for text in texts) for piece in shown)


def test_every_example_that_reads_a_dataset_is_tried():
    reads = {
        path.stem
        for path in EXAMPLES.glob("*.toml")
        if any(one.source.startswith("hf:") for one in load_run(path).data.sources)
    }
    assert reads == set(DATASETS)


def test_of_a_conversation_only_the_answer_is_learned(tmp_path):
    run, _ = local("chat", tmp_path / "dataset")
    view = show_data(run, count=4)
    learned = [piece.text for one in view.examples for part in one.parts for piece in part.pieces if piece.learned]
    assert any(text.startswith(tuple(WORDS)) for text in learned)
    assert not any("Go on." in text or "im_start" in text for text in learned)
    assert view.packing == "packed" and view.document_mask
