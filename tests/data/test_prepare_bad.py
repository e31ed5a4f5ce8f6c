import json

import numpy as np
import pytest
from helpers import write_corpus
from prepared import Documents, documents, prepare_one

from meshwright.data import encode
from meshwright.data.documents import Document
from meshwright.data.duplicates import Seen
from meshwright.data.prepare import prepare
from meshwright.errors import UserError

TEXTS = [f"document {number}" for number in range(60)]


class Given:
    """A source of ready documents."""

    def __init__(self, *given: Document) -> None:
        self.given = given

    def describe(self):
        return {"name": "given", "fingerprint": str(len(self.given))}

    def documents(self):
        return iter(self.given)


def test_bad_documents_are_counted_by_kind_and_the_first_are_named(make):
    bad = [Document(f"bad-{i}", fault=f"not UTF-8 (byte {i})") for i in range(12)]
    more = [Document("a.jsonl#3", fault="not JSON: line 1 column 5"), Document("a.jsonl#9", fault="not JSON: line 1")]
    fine = [Document(text, text) for text in TEXTS]
    notes = []
    store = prepare_one(make("given"), source=Given(*bad[:6], *fine, *more, *bad[6:]), on_note=notes.append)
    left_out = store.manifest["left_out"]
    assert (left_out["documents"], left_out["kinds"]) == (14, {"not UTF-8": 12, "not JSON": 2})
    assert len(left_out["examples"]) == 10 and left_out["examples"][6] == "a.jsonl#3: not JSON: line 1 column 5"
    assert sorted(documents(store, "train") + documents(store, "validation")) == sorted(TEXTS)
    assert notes == [
        "documents left out: 14 that can't be used (12 not UTF-8, 2 not JSON; the first bad-0: not UTF-8 (byte 0))"
    ]


def test_names_that_are_not_utf8_can_be_named(make, tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "a\udce9.txt").write_bytes(b"\xff")
    (tmp_path / "corpus" / "b.csv").write_bytes(b"num\xe9ro\n1\n")
    left_out = prepare_one(make(tmp_path / "corpus")).manifest["left_out"]
    first, second = left_out["examples"]
    assert first == "a\\udce9.txt: not UTF-8 (byte 0)"
    assert second == "b.csv#1: missing field (text; there are num\\udce9ro)"


def test_nothing_is_said_when_nothing_is_left_out(make):
    notes = []
    prepare(make("mine"), source=Documents(*TEXTS), on_note=notes.append)
    prepare(make("mine"), source=Documents(*TEXTS), on_note=notes.append)
    assert notes == []


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_stop_refuses_at_the_first_bad_document(make, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 50)
    given = Given(*(Document(text, text) for text in TEXTS), Document("a.jsonl#7", fault="no field 'text'"))
    tokenizer = {"kind": kind, "vocab_size": 300}
    with pytest.raises(UserError, match=r"data.on_bad = 'stop': a.jsonl#7: no field 'text'; .*\"skip\"") as caught:
        prepare(make("given", data={"on_bad": "stop"}, tokenizer=tokenizer), source=given)
    assert "\n" not in str(caught.value) and not (tmp_path / "store").exists()
    assert prepare_one(make("given", tokenizer=tokenizer), source=given).manifest["left_out"]["documents"] == 1


def test_stop_leaves_the_work_for_skip_to_go_on_with(make, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 50)
    monkeypatch.setattr("meshwright.data.make.COMMIT_BYTES", 100)
    given = Given(*(Document(text, text) for text in TEXTS), Document("bad", fault="odd"), Document("last", "last"))
    with pytest.raises(UserError):
        prepare(make("given", data={"on_bad": "stop"}), source=given)
    assert json.loads((tmp_path / "store.partial" / "state.json").read_text())["mark"][0] > 30
    store = prepare_one(make("given"), source=given)
    assert store.split("train").document_count + store.split("validation").document_count == 61


def test_duplicates_are_kept_once(make, tmp_path):
    texts = [*TEXTS, *TEXTS[::-1], "once"]
    notes = []
    store = prepare_one(make("mine", data={"deduplicate": True}), source=Documents(*texts), on_note=notes.append)
    once = prepare_one(make("mine", data={"store": str(tmp_path / "once")}), source=Documents(*TEXTS, "once"))
    for split in ("train", "validation"):
        assert documents(store, split) == documents(once, split)
        assert store.split(split).byte_count == once.split(split).byte_count
    assert store.manifest["duplicates"] == 60 and once.manifest["duplicates"] == 0
    assert notes == ["documents left out: 60 duplicates"]


def test_without_the_key_duplicates_stay_and_on_one_side(make):
    store = prepare_one(make("mine"), source=Documents(*TEXTS, *TEXTS))
    train, validation = documents(store, "train"), documents(store, "validation")
    assert len(train) + len(validation) == 120 and not set(train) & set(validation)


def test_what_stands_in_the_validation_source_is_not_learned(make, tmp_path):
    write_corpus(tmp_path / "corpus")
    write_corpus(tmp_path / "held-out", documents=10, seed=1)
    known = (tmp_path / "corpus" / "007.txt").read_text()
    (tmp_path / "held-out" / "known.txt").write_text(known)
    data = {"validation": str(tmp_path / "held-out"), "deduplicate": True}
    store = prepare_one(make(tmp_path / "corpus", data=data))
    assert store.split("validation").document_count == 11 and known in documents(store, "validation")
    assert store.split("train").document_count == 59 and known not in documents(store, "train")
    assert store.manifest["duplicates"] == 1
    plain = prepare_one(make(tmp_path / "corpus", data={**data, "deduplicate": False, "store": f"{tmp_path}/plain"}))
    assert documents(plain, "validation") == documents(store, "validation") and known in documents(plain, "train")


def test_all_training_documents_may_turn_out_to_be_held_out(make, tmp_path):
    write_corpus(tmp_path / "corpus", documents=3)
    data = {"validation": str(tmp_path / "corpus"), "deduplicate": True}
    with pytest.raises(UserError, match=r"no training documents \(all are duplicates of what is held out\)"):
        prepare(make(tmp_path / "corpus", data=data))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


@pytest.mark.parametrize(("form", "same"), [("none", 0), ("nfc", 1), ("nfkc", 2)])
def test_normalised_text_is_what_is_written_hashed_and_compared(make, form, same):
    texts = ["é", "e\u0301", "ﬁ", "fi", *TEXTS]
    data = {"normalize": form, "deduplicate": True}
    store = prepare_one(make("mine", data=data), source=Documents(*texts))
    assert store.manifest["duplicates"] == same
    both = documents(store, "train") + documents(store, "validation")
    assert ("e\u0301" in both) == (form == "none") and ("ﬁ" in both) == (form != "nfkc") and "é" in both


def test_keys_that_change_the_bytes_change_the_key_and_the_others_do_not(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def key(**data) -> str:
        return prepare_one(make("mine", data={"store": "", **data}), source=Documents(*TEXTS)).path.name

    plain = key()
    assert key(processes=3) == key(on_bad="stop") == plain
    changed = [key(normalize="nfc"), key(normalize="nfkc"), key(deduplicate=True), key(validation=0.3)]
    assert len({plain, *changed}) == 5


def test_seen_keeps_what_was_committed_and_forgets_the_rest(tmp_path):
    seen = Seen(tmp_path / "seen.db", 0)
    assert [seen.add(bytes([i % 3] * 16)) for i in range(5)] == [True, True, True, False, False]
    seen.commit()
    assert seen.add(b"later" * 3 + b"!")
    seen.commit()  # the table is committed, and the state that would name it isn't: the process dies here
    seen.close()
    seen = Seen(tmp_path / "seen.db", 1)
    assert not seen.add(bytes(16)) and seen.add(b"later" * 3 + b"!")
    seen.close()
    seen = Seen(tmp_path / "seen.db", 1)
    assert seen.add(b"later" * 3 + b"!")


def talk(number: int, role: str = "assistant") -> Document:
    messages = ({"role": "user", "content": f"q{number}"}, {"role": role, "content": f"a{number}"})
    return Document(f"talk-{number}", messages=messages, place=(0, number))


@pytest.mark.parametrize("processes", [1, 2])
def test_conversations_have_weights(make, monkeypatch, processes):
    monkeypatch.setattr("meshwright.data.writer.SHARD_TOKENS", 500)
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 40)
    monkeypatch.setattr("meshwright.data.workers.ALONE_CHARACTERS", 40)
    more = [talk(5), talk(31, "user"), Document("text", "plain")]
    data = {"chat": "chatml", "deduplicate": True, "validation": 0.3, "processes": processes}
    store = prepare_one(make("given", data=data), source=Given(*(talk(i) for i in range(30)), *more))
    assert store.manifest["left_out"]["kinds"] == {"no turn of the assistant's": 1}
    assert store.manifest["duplicates"] == 1
    assert len(list(store.path.glob("train_*.weights"))) == len(list(store.path.glob("train_0*.bin"))) > 1
    shown = {}
    for name in ("train", "validation"):
        split = store.split(name)
        for start, length in map(split.document_range, range(split.document_count)):
            tokens, weights = split.read(start, length), split.read_weights(start, length)
            assert weights.dtype == np.float32
            text = "".join(chr(token) if token < 256 else "$" for token in tokens)
            shown[text] = "".join(letter for letter, weight in zip(text, weights, strict=True) if weight)
    whole = "<|im_start|>user\nq7<|im_end|>\n<|im_start|>assistant\na7<|im_end|>\n$"
    assert shown[whole] == "a7<|im_end|>$" and shown["plain$"] == "plain$" and len(shown) == 31
    total = sum(store.split(name).byte_count for name in ("train", "validation"))
    assert total == sum(len(f"q{i}a{i}") for i in range(30)) + len("plain")


def test_another_template_makes_another_store(make, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    run = make("given", data={"chat": str(tmp_path / "own.jinja")})
    given = Given(*(talk(i) for i in range(60)))
    prepare_one(run, source=given)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=r"made from something else \(chat "):
        prepare(run, source=given)


def test_what_was_left_out_is_refused_under_stop(make):
    given = Given(*(Document(text, text) for text in TEXTS), Document("bad one", "a\0b"))
    prepare_one(make("given"), source=given)
    with pytest.raises(UserError, match=r"data.on_bad = 'stop': the store at .* left out bad one: NUL byte"):
        prepare(make("given", data={"on_bad": "stop"}), source=given)


def test_a_conversation_without_a_template_is_bad_input(make):
    talk = Document("talk", messages=({"role": "user", "content": "hello"},))
    store = prepare_one(make("given"), source=Given(talk, *(Document(text, text) for text in TEXTS)))
    assert store.manifest["left_out"]["kinds"] == {"a conversation": 1}
    assert not store.split("train").is_weighted and (store.split("train").read_weights(0, 9) == 1).all()
