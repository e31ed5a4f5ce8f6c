import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import write_corpus
from prepared import Documents, documents, prepare_one

from meshwright.data import encode, training_text, writer
from meshwright.data.sources import open_source
from meshwright.data.store import SPLITS, Store
from meshwright.data.tokenizer import load_tokenizer, open_tokenizer, train_bpe
from meshwright.errors import UserError


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("kind", ["bytes", "bpe", "tiktoken:gpt2"])
def test_the_store_holds_every_document_once(make, corpus, kind):
    run = make(corpus, tokenizer={"kind": kind, "vocab_size": 300})
    store = prepare_one(run)
    texts = [document.text for document in open_source(str(corpus)).documents()]
    both = documents(store, "train") + documents(store, "validation")
    assert sorted(both) == sorted(texts) and len(set(texts)) == 60
    assert [text for text in texts if text in documents(store, "train")] == documents(store, "train")
    for split in SPLITS:
        assert store.split(split).byte_count == sum(len(text.encode()) for text in documents(store, split))
    assert 2 < store.split("validation").document_count < 25
    assert store.tokenizer().kind == kind and store.path == Path(run.data.store)
    if kind == "bpe":
        assert store.tokenizer().vocab_size == 300
        assert store.split("train").token_count < store.split("train").byte_count / 2


def test_it_is_opened_and_not_made_again(make, corpus):
    stages = []
    run = make(corpus)
    one = prepare_one(run, on_progress=lambda *report: stages.append(report))
    made = Path(run.data.store, "manifest.json").stat().st_mtime_ns
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert stages[-1] == ("encode", size, size, size + 60, 60)
    del stages[:]
    other = prepare_one(run, on_progress=lambda *report: stages.append(report))
    assert not stages and other.fingerprint == one.fingerprint
    assert Path(run.data.store, "manifest.json").stat().st_mtime_ns == made


def test_two_makings_give_the_same_store(make, corpus, tmp_path):
    tokenizer = {"kind": "bpe", "vocab_size": 400}
    one, other = (prepare_one(make(corpus, data={"store": str(tmp_path / name)}, tokenizer=tokenizer)) for name in "ab")
    assert one.path != other.path and one.fingerprint == other.fingerprint
    for path in one.path.rglob("*.bin"):
        assert path.read_bytes() == (other.path / path.relative_to(one.path)).read_bytes()


def test_without_a_name_the_key_names_it(make, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        prepare_one(make("corpus", data={"store": ""})).path,
        prepare_one(make("./corpus/*.txt", data={"store": ""})).path,  # the same files
        prepare_one(make("corpus", data={"store": "", "validation": 0.3})).path,
        prepare_one(make("corpus", data={"store": ""}, tokenizer={"kind": "bpe", "vocab_size": 300})).path,
    ]
    assert paths[0] == paths[1] and len(set(paths)) == 3
    assert all(path.parent == Path("stores") and len(path.name) == 16 for path in paths)


def test_a_store_made_from_something_else_is_refused_and_left(make, corpus):
    made = prepare_one(make(corpus))
    cases = [
        ({"tokenizer": {"kind": "bpe", "vocab_size": 300}}, "tokenizer bytes there, bpe of 300 here"),
        ({"data": {"validation": 0.3}}, r"validation 0.2 there, 0.3 here"),
        ({"data": {"separator": "."}}, r"separator '' there, '.' here"),
    ]
    for sections, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            prepare_one(make(corpus, **sections))
        assert str(made.path) in str(caught.value) and "\n" not in str(caught.value)
    (corpus / "000.txt").write_text("changed")
    with pytest.raises(UserError, match=r"source .* there, .* here"):
        prepare_one(make(corpus))
    assert Store.open(made.path).fingerprint == made.fingerprint


def test_a_folder_of_something_else_is_left_alone(make, corpus, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match=r"no manifest.json"):
        prepare_one(make(corpus))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


def test_duplicates_stay_on_one_side(make):
    texts = [f"document {i % 40}" for i in range(120)]
    store = prepare_one(make("mine"), source=Documents(*texts))
    train, validation = documents(store, "train"), documents(store, "validation")
    assert len(train) + len(validation) == 120 and len(train) % 3 == len(validation) % 3 == 0 and validation
    assert not set(train) & set(validation)


def test_a_document_keeps_its_side_whatever_comes_beside_it(make, tmp_path):
    texts = [f"document {i}" for i in range(60)]
    few = prepare_one(make("mine", data={"store": str(tmp_path / "a")}), source=Documents(*texts[:30]))
    many = prepare_one(make("mine", data={"store": str(tmp_path / "b")}), source=Documents(*reversed(texts)))
    assert set(documents(few, "validation")) == set(documents(many, "validation")) & set(texts[:30])
    assert documents(few, "validation") and len(documents(many, "validation")) > len(documents(few, "validation"))


def test_validation_may_be_a_source_of_its_own(make, corpus, tmp_path):
    (tmp_path / "held.txt").write_text("held out, quite another text")
    store = prepare_one(make(corpus, data={"validation": str(tmp_path / "held.txt")}))
    assert documents(store, "validation") == ["held out, quite another text"]
    assert store.split("train").document_count == 60


def test_no_validation_when_none_is_asked_for(make, corpus):
    store = prepare_one(make(corpus, data={"validation": 0.0}))
    assert (store.split("train").document_count, store.split("validation").token_count) == (60, 0)


def test_what_cannot_be_used_is_left_out_and_named(make):
    texts = ["one", "", "two", "half \ud83d", *map(str, range(30))]
    store = prepare_one(make("mine"), source=Documents(*texts))
    left_out = store.manifest["left_out"]
    assert left_out["documents"] == 2 and left_out["kinds"] == {"empty": 1, "holds half a character": 1}
    assert left_out["examples"] == ["mine-1: empty", "mine-3: holds half a character (a lone surrogate)"]
    assert store.split("train").document_count + store.split("validation").document_count == 32


def test_literal_end_of_text_in_a_document_is_text(make):
    texts = [f"before <|endoftext|> after {i}" for i in range(30)]
    store = prepare_one(make("mine", tokenizer={"kind": "tiktoken:gpt2"}), source=Documents(*texts))
    tokens = store.split("train").read(0, store.split("train").token_count)
    assert (tokens == 50256).sum() == store.split("train").document_count
    assert set(documents(store, "train")) <= set(texts)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "tiktoken:gpt2"])
def test_blocks_pieces_and_shards_change_nothing(make, tmp_path, monkeypatch, kind):
    source = Documents(*(f"{i} letters in words, and\n    more of them\n" * (1 + i % 7) for i in range(40)))
    tokenizer = {"kind": kind, "vocab_size": 300}
    whole = prepare_one(make("mine", data={"store": str(tmp_path / "whole")}, tokenizer=tokenizer), source=source)
    for name, value in {"BLOCK_CHARACTERS": 50, "PIECE_CHARACTERS": 64, "BORDER_SEARCH": 40}.items():
        monkeypatch.setattr(encode, name, value)
    monkeypatch.setattr(writer, "SHARD_TOKENS", 100)
    cut = prepare_one(make("mine", data={"store": str(tmp_path / "cut")}, tokenizer=tokenizer), source=source)
    assert len(cut.manifest["splits"]["train"]["shards"]) > 5 > len(whole.manifest["splits"]["train"]["shards"])
    for split in SPLITS:
        one, other = whole.split(split), cut.split(split)
        assert np.array_equal(one.read(0, one.token_count), other.read(0, other.token_count))
        assert np.array_equal(one.document_ends, other.document_ends) and one.byte_count == other.byte_count


def test_cutting_keeps_the_text_and_the_tokens(monkeypatch):
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 3000)
    monkeypatch.setattr(encode, "BORDER_SEARCH", 2900)
    paths = [json.__file__, json.decoder.__file__, subprocess.__file__]
    text = "\n".join(document.text for path in paths for document in open_source(path).documents())
    pieces = list(encode.cut(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= 3000 and len(pieces) > 25
    for tokenizer in (train_bpe([text], 1000), open_tokenizer("tiktoken:gpt2")):
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)
    assert [len(piece) for piece in encode.cut("x" * 7000)] == [3000, 3000, 1000]
    assert next(encode.cut("你\n" * 2000)).endswith("\n")


def test_the_tokenizer_trains_on_a_spread_of_the_training_documents(monkeypatch):
    monkeypatch.setattr(training_text, "TRAINING_BYTES", 2000)

    class Sized(Documents):
        size: int | None = 20_000

    def chosen(*sources: Sized) -> list[int]:
        sized = [(source, source.size) for source in sources]
        texts = training_text.training_texts(sized, 0.2, "none", False, lambda *report: None)
        return [int(text[:4]) for text in texts]

    one, other = (Sized(*(f"{i:04} " + "x" * 95 for i in range(first, first + 200))) for first in (0, 1000))
    items = [(int(document.text[:4]), encode.digest_and_size(document)[0]) for document in one.documents()]
    held_out = {number for number, digest in items if encode.is_held_out(digest, 0.2)}
    spread = chosen(one)
    assert 8 <= len(spread) <= 20 and max(spread) > 120 and spread == chosen(one)
    both = chosen(one, other)
    assert len(both) <= 22 and len([number for number in both if number < 1000]) in range(4, 12)
    other.size = None
    first, half = chosen(other), chosen(one, other)
    assert len(first) == 20 and max(first) < 1040 and len(half) == 20 and max(half) < 1020
    assert not held_out & {*spread, *both} and held_out


def test_nothing_is_left_beside_after_a_failure(make, tmp_path):
    class Failing(Documents):
        def documents(self):
            yield from super().documents()
            raise ConnectionError("the archive went away")

    with pytest.raises(ConnectionError):
        prepare_one(make("mine"), source=Failing(*map(str, range(50))))
    assert list(tmp_path.iterdir()) == []


def test_a_prepared_store_as_data_train(make, corpus):
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    made = prepare_one(make(corpus, tokenizer=tokenizer))
    assert prepare_one(make(made.path, data={"store": ""}, tokenizer=tokenizer)).fingerprint == made.fingerprint
    same = {"kind": f"hf:{made.path / 'tokenizer'}"}
    assert prepare_one(make(made.path, data={"store": ""}, tokenizer=same)).fingerprint == made.fingerprint
    for other in ({"kind": "bytes"}, {"kind": "bpe", "vocab_size": 301}):
        with pytest.raises(
            UserError, match=r"was made with bpe of 300 .* vocab_size = 300 under \[tokenizer\]"
        ) as caught:
            prepare_one(make(made.path, data={"store": ""}, tokenizer=other))
        assert "\n" not in str(caught.value)


def test_a_nanogpt_pair_as_data_train(make, tmp_path):
    for name in ("train", "val"):
        np.array([15496, 995, 50256] * 20, np.uint16).tofile(tmp_path / f"{name}.bin")
    train, validation = tmp_path / "train.bin", str(tmp_path / "val.bin")
    default = {"kind": "bpe", "vocab_size": 4096}
    store = prepare_one(make(train, data={"validation": validation}, tokenizer=default))
    assert store.tokenizer().kind == "tiktoken:gpt2"
    assert documents(store, "train")[0] == "Hello world"
    with pytest.raises(UserError, match="encoded already"):
        prepare_one(make(train, data={"validation": validation}, tokenizer={"kind": "bpe", "vocab_size": 300}))
    with pytest.raises(UserError, match=r"data.validation = 0.2: .*must be a path"):
        prepare_one(make(train))


def test_mistakes_are_one_line(make, tmp_path):
    cases = [
        (Documents("a"), {}, "data.validation = 0.2 holds out all 1"),
        (Documents("b"), {}, "holds out none of the 1 documents"),
        (Documents(""), {}, r"no training documents \(1 left out, the first mine-0: empty\)"),
        (Documents(), {}, "no training documents"),
        (Documents("a"), {"tokenizer": {"kind": "bpe", "vocab_size": 200}}, "tokenizer.vocab_size = 200"),
        (None, {}, "no such file or folder"),
    ]
    for source, sections, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            prepare_one(make("mine", **sections), source=source)
        assert "\n" not in str(caught.value) and not (tmp_path / "store").exists()


def test_grain_stays_out(make, corpus, tmp_path):
    (tmp_path / "run.toml").write_text(make(corpus, tokenizer={"kind": "bpe", "vocab_size": 300}).to_toml())
    program = """
import sys
from meshwright.config import load_run
from meshwright.data.prepare import prepare
prepare(load_run(sys.argv[1]))
print(sorted({"grain", "jax", "torch", "ray", "tiktoken", "tokenizers"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.toml")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['tokenizers']"
    assert load_tokenizer(tmp_path / "store" / "tokenizer").vocab_size == 300
