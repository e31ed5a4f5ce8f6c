import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import write_corpus

from meshwright.data import encode, writer
from meshwright.data.prepare import prepare
from meshwright.data.sources import Document, open_source
from meshwright.data.store import SPLITS, Store
from meshwright.data.tokenizer import load_tokenizer, open_tokenizer, train_bpe
from meshwright.errors import UserError


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus")


def documents(store: Store, split: str) -> list[str]:
    tokens = store.split(split)
    return [store.tokenizer().decode(tokens.document(i)) for i in range(tokens.document_count)]


class Documents:
    """A researcher's own source."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def describe(self):
        return {"name": "mine", "fingerprint": str(hash(self.texts))}

    def documents(self):
        return iter([Document(f"mine-{i}", text) for i, text in enumerate(self.texts)])


@pytest.mark.parametrize("kind", ["bytes", "bpe", "tiktoken:gpt2"])
def test_the_store_holds_every_document_once(make, corpus, kind):
    run = make(corpus, tokenizer={"kind": kind, "vocab_size": 300})
    store = prepare(run)
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
    one = prepare(run, on_progress=lambda *report: stages.append(report))
    made = Path(run.data.store, "manifest.json").stat().st_mtime_ns
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert stages[-1] == ("encode", size, size, size + 60, 60)
    del stages[:]
    other = prepare(run, on_progress=lambda *report: stages.append(report))
    assert not stages and other.fingerprint == one.fingerprint
    assert Path(run.data.store, "manifest.json").stat().st_mtime_ns == made


def test_two_makings_give_the_same_store(make, corpus, tmp_path):
    tokenizer = {"kind": "bpe", "vocab_size": 400}
    one, other = (prepare(make(corpus, data={"store": str(tmp_path / name)}, tokenizer=tokenizer)) for name in "ab")
    assert one.path != other.path and one.fingerprint == other.fingerprint
    for path in one.path.rglob("*.bin"):
        assert path.read_bytes() == (other.path / path.relative_to(one.path)).read_bytes()


def test_without_a_name_the_key_names_it(make, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        prepare(make("corpus", data={"store": ""})).path,
        prepare(make("./corpus/*.txt", data={"store": ""})).path,  # the same files
        prepare(make("corpus", data={"store": "", "validation": 0.3})).path,
        prepare(make("corpus", data={"store": ""}, tokenizer={"kind": "bpe", "vocab_size": 300})).path,
    ]
    assert paths[0] == paths[1] and len(set(paths)) == 3
    assert all(path.parent == Path("stores") and len(path.name) == 16 for path in paths)


def test_a_store_made_from_something_else_is_refused_and_left(make, corpus):
    made = prepare(make(corpus))
    cases = [
        ({"tokenizer": {"kind": "bpe", "vocab_size": 300}}, "tokenizer bytes there, bpe of 300 here"),
        ({"data": {"validation": 0.3}}, r"validation 0.2 there, 0.3 here"),
        ({"data": {"separator": "."}}, r"separator '' there, '.' here"),
    ]
    for sections, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            prepare(make(corpus, **sections))
        assert str(made.path) in str(caught.value) and "\n" not in str(caught.value)
    (corpus / "000.txt").write_text("changed")
    with pytest.raises(UserError, match=r"source .* there, .* here"):
        prepare(make(corpus))
    assert Store.open(made.path).fingerprint == made.fingerprint


def test_a_folder_of_something_else_is_left_alone(make, corpus, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match=r"no manifest.json"):
        prepare(make(corpus))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


def test_duplicates_stay_on_one_side(make):
    texts = [f"document {i % 40}" for i in range(120)]
    store = prepare(make("mine"), source=Documents(*texts))
    train, validation = documents(store, "train"), documents(store, "validation")
    assert len(train) + len(validation) == 120 and len(train) % 3 == len(validation) % 3 == 0 and validation
    assert not set(train) & set(validation)


def test_a_document_keeps_its_side_whatever_comes_beside_it(make, tmp_path):
    texts = [f"document {i}" for i in range(60)]
    few = prepare(make("mine", data={"store": str(tmp_path / "a")}), source=Documents(*texts[:30]))
    many = prepare(make("mine", data={"store": str(tmp_path / "b")}), source=Documents(*reversed(texts)))
    assert set(documents(few, "validation")) == set(documents(many, "validation")) & set(texts[:30])
    assert documents(few, "validation") and len(documents(many, "validation")) > len(documents(few, "validation"))


def test_validation_may_be_a_source_of_its_own(make, corpus, tmp_path):
    (tmp_path / "held.txt").write_text("held out, quite another text")
    store = prepare(make(corpus, data={"validation": str(tmp_path / "held.txt")}))
    assert documents(store, "validation") == ["held out, quite another text"]
    assert store.split("train").document_count == 60


def test_no_validation_when_none_is_asked_for(make, corpus):
    store = prepare(make(corpus, data={"validation": 0.0}))
    assert (store.split("train").document_count, store.split("validation").token_count) == (60, 0)


def test_what_cannot_be_used_is_left_out_and_named(make):
    texts = ["one", "", "two", "half \ud83d", *map(str, range(30))]
    store = prepare(make("mine"), source=Documents(*texts))
    left_out = store.manifest["left_out"]
    assert left_out["documents"] == 2
    assert left_out["examples"] == ["mine-1: empty", "mine-3: holds half a character (a lone surrogate)"]
    assert store.split("train").document_count + store.split("validation").document_count == 32


def test_literal_end_of_text_in_a_document_is_text(make):
    texts = [f"before <|endoftext|> after {i}" for i in range(30)]
    store = prepare(make("mine", tokenizer={"kind": "tiktoken:gpt2"}), source=Documents(*texts))
    tokens = store.split("train").read(0, store.split("train").token_count)
    assert (tokens == 50256).sum() == store.split("train").document_count
    assert set(documents(store, "train")) <= set(texts)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "tiktoken:gpt2"])
def test_batches_pieces_and_shards_change_nothing(make, tmp_path, monkeypatch, kind):
    source = Documents(*(f"{i} letters in words, and\n    more of them\n" * (1 + i % 7) for i in range(40)))
    tokenizer = {"kind": kind, "vocab_size": 300}
    whole = prepare(make("mine", data={"store": str(tmp_path / "whole")}, tokenizer=tokenizer), source=source)
    for name, value in {"BATCH_CHARACTERS": 50, "PIECE_CHARACTERS": 64, "BORDER_SEARCH": 40}.items():
        monkeypatch.setattr(encode, name, value)
    monkeypatch.setattr(writer, "SHARD_TOKENS", 100)
    cut = prepare(make("mine", data={"store": str(tmp_path / "cut")}, tokenizer=tokenizer), source=source)
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
    monkeypatch.setattr(encode, "BPE_TRAINING_BYTES", 2000)
    source = Documents(*(f"{i:04} " + "x" * 95 for i in range(200)))
    left_out = encode.LeftOut()

    def chosen(total: int | None) -> list[int]:
        texts = encode.bpe_texts(encode.sided(source, 0.2, left_out), total, lambda *report: None)
        return [int(text[:4]) for text in texts]

    held_out = {int(item.document.text[:4]) for item in encode.sided(source, 0.2, left_out) if item.split != "train"}
    spread, first = chosen(20_000), chosen(None)
    assert 8 <= len(spread) <= 20 and max(spread) > 120 and spread == chosen(20_000)
    assert len(first) == 20 and max(first) < 40
    assert not held_out & {*spread, *first} and held_out


def test_nothing_is_left_beside_after_a_failure(make, tmp_path):
    class Failing(Documents):
        def documents(self):
            yield from super().documents()
            raise ConnectionError("the archive went away")

    with pytest.raises(ConnectionError):
        prepare(make("mine"), source=Failing(*map(str, range(50))))
    assert list(tmp_path.iterdir()) == []


def test_only_our_own_dead_partials_are_removed(make, corpus, tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = os.uname().nodename
    left = {"store.partial-1": (int(dead.stdout), host), "store.partial-2": (os.getpid(), host)}
    left["store.partial-3"] = (int(dead.stdout), "another-host")
    for name, (process, where) in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / writer.MARKER).write_text(json.dumps({"process": process, "host": where}))
    (tmp_path / "store.partial-4").mkdir()
    (tmp_path / "store.partial-4" / "notes.txt").write_text("a user's")
    prepare(make(corpus))
    beside = sorted(path.name for path in tmp_path.iterdir())
    assert beside == ["corpus", "store", "store.partial-2", "store.partial-3", "store.partial-4"]


def test_a_killed_prepare_leaves_no_store(make, corpus, tmp_path):
    program = """
import os, signal, sys
from meshwright.config import load_run
from meshwright.data.prepare import prepare
prepare(load_run(sys.argv[1]), on_progress=lambda *report: os.kill(os.getpid(), signal.SIGKILL))
"""
    run = make(corpus)
    (tmp_path / "run.toml").write_text(run.to_toml())
    died = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run.toml")], check=False)
    assert died.returncode == -9 and list(tmp_path.glob("store.partial-*"))
    assert not (tmp_path / "store").exists()
    assert prepare(run).split("train").document_count > 0
    assert not list(tmp_path.glob("store.partial-*"))


def test_the_second_of_two_at_once_opens_what_the_first_made(make, corpus, tmp_path):
    run = make(corpus)
    inner = []
    outer = prepare(run, on_progress=lambda *report: inner or inner.append(prepare(run)))
    assert outer.fingerprint == inner[0].fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]


def test_a_prepared_store_as_data_train(make, corpus):
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    made = prepare(make(corpus, tokenizer=tokenizer))
    assert prepare(make(made.path, data={"store": ""}, tokenizer=tokenizer)).fingerprint == made.fingerprint
    same = {"kind": f"hf:{made.path / 'tokenizer'}"}
    assert prepare(make(made.path, data={"store": ""}, tokenizer=same)).fingerprint == made.fingerprint
    for other in ({"kind": "bytes"}, {"kind": "bpe", "vocab_size": 301}):
        with pytest.raises(
            UserError, match=r"was made with bpe of 300 .* vocab_size = 300 under \[tokenizer\]"
        ) as caught:
            prepare(make(made.path, data={"store": ""}, tokenizer=other))
        assert "\n" not in str(caught.value)


def test_a_nanogpt_pair_as_data_train(make, tmp_path):
    for name in ("train", "val"):
        np.array([15496, 995, 50256] * 20, np.uint16).tofile(tmp_path / f"{name}.bin")
    train, validation = tmp_path / "train.bin", str(tmp_path / "val.bin")
    default = {"kind": "bpe", "vocab_size": 4096}
    store = prepare(make(train, data={"validation": validation}, tokenizer=default))
    assert store.tokenizer().kind == "tiktoken:gpt2"
    assert documents(store, "train")[0] == "Hello world"
    with pytest.raises(UserError, match="encoded already"):
        prepare(make(train, data={"validation": validation}, tokenizer={"kind": "bpe", "vocab_size": 300}))
    with pytest.raises(UserError, match=r"data.validation = 0.2: .*must be a path"):
        prepare(make(train))


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
            prepare(make("mine", **sections), source=source)
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
