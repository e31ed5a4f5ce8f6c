import json
from pathlib import Path

import numpy as np
import pytest
from helpers import write_corpus
from prepared import contents, documents

from meshwright.data.prepare import prepare
from meshwright.data.recipes import names_of
from meshwright.data.store import Store
from meshwright.errors import UserError


def mixed(make, listed: list[dict], tokenizer: dict | None = None, **data):
    """A run over these sources."""
    return make("", data={**data, "train": listed}, tokenizer=tokenizer or {"kind": "bytes"})


@pytest.fixture
def several(tmp_path, make):
    """`several(**data)`: a run over three small corpora."""
    for number, name in enumerate(("books", "code", "talk")):
        write_corpus(tmp_path / name, documents=20 + 10 * number, seed=number)

    def run(*names, tokenizer=None, **data):
        listed = [{"source": str(tmp_path / name)} for name in names or ("books", "code", "talk")]
        return mixed(make, listed, tokenizer=tokenizer or {"kind": "bytes"}, **data)

    return run


def texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.txt"))]


def test_each_source_has_a_store_in_the_folder_of_the_run(several, tmp_path):
    corpus = prepare(several())
    assert [store.path for store in corpus.stores] == [
        tmp_path / "store" / f"{n}" for n in ("1-books", "2-code", "3-talk")
    ]
    assert corpus.names == ["books", "code", "talk"] and corpus.path == corpus.stores[0].path
    for name, store in zip(corpus.names, corpus.stores, strict=True):
        assert sorted(documents(store, "train") + documents(store, "validation")) == sorted(texts(tmp_path / name))
    assert corpus.train_tokens == sum(store.split("train").token_count for store in corpus.stores)
    assert [split.name for split in corpus.validation] == ["validation"] * 3
    assert corpus.vocab_size == 257 and corpus.tokenizer().kind == "bytes"
    assert prepare(several()).fingerprint == corpus.fingerprint


def test_without_a_folder_each_store_has_its_own_key(several, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = prepare(several(store=""))
    assert len({store.path for store in corpus.stores}) == 3
    assert all(store.path.parent == Path("stores") for store in corpus.stores)
    assert prepare(several("books", store="")).path == corpus.path  # the same store alone


def test_one_source_is_its_store(several, make, tmp_path):
    corpus = prepare(several("books"))
    (store,) = corpus.stores
    assert corpus.fingerprint == store.fingerprint and store.path == tmp_path / "store"
    assert corpus.weights == [[(0, 1.0)]] and corpus.names == ["books"]
    assert prepare(make(tmp_path / "books")).fingerprint == corpus.fingerprint


def test_the_fingerprint_covers_every_source_and_their_order(several, tmp_path):
    found = {
        prepare(several(*names, store=str(tmp_path / "-".join(names)))).fingerprint
        for names in (("books", "code"), ("code", "books"), ("books", "talk"), ("books", "code", "talk"))
    }
    assert len(found) == 4


def test_weights_and_names(make, tmp_path):
    for place in ("a/texts", "b/texts"):
        write_corpus(tmp_path / place)
    listed = [
        {"source": f"{tmp_path}/a/texts/*.txt", "weight": 3.0, "later": [{"step": 10, "weight": 1.0}]},
        {"source": str(tmp_path / "b" / "texts")},
    ]
    corpus = prepare(mixed(make, listed))
    assert corpus.names == ["texts", "texts-2"]
    assert corpus.weights == [[(0, 3.0), (10, 1.0)], [(0, 1.0)]]


def test_names_are_all_different():
    assert names_of(["x/a-2", "y/a", "z/a"]) == ["a-2", "a", "a-3"]
    assert names_of(["a", "b/a", "c/a"]) == ["a", "a-2", "a-3"]
    assert names_of(["a", "a-2", "a", "a-2"]) == ["a", "a-2", "a-3", "a-2-2"]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ([{"step": 5, "weight": 1.0}, {"step": 3, "weight": 1.0}], "from step 3 after one from step 5"),
        ([{"step": 0, "weight": 1.0}], "from step 0 after one from step 0"),
        ([{"step": 4, "weight": 0.0}], "all weights are 0 from step 4"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_before_any_work(make, tmp_path, later, words):
    write_corpus(tmp_path / "books")
    with pytest.raises(UserError, match=rf"data\.train: .*{words}"):
        prepare(mixed(make, [{"source": str(tmp_path / "books"), "later": later}]))
    assert not (tmp_path / "store").exists()


def test_one_tokenizer_is_trained_on_all_sources(several, tmp_path):
    bpe = {"kind": "bpe", "vocab_size": 300}
    (tmp_path / "talk" / "more.txt").write_text("zyzzyva " * 2000)
    stages = []
    corpus = prepare(several(tokenizer=bpe), on_progress=lambda stage, *rest: stages.append(stage))
    assert len({store.manifest["tokenizer"]["fingerprint"] for store in corpus.stores}) == 1
    assert {"encode books", "encode code", "encode talk"} <= set(stages)
    assert b"zyzzyva" in b" ".join(corpus.tokenizer().token_bytes())
    alone = prepare(several("books", tokenizer=bpe, store=str(tmp_path / "alone")))
    assert b"zyzzyva" not in b" ".join(alone.tokenizer().token_bytes())
    with pytest.raises(UserError, match="made from something else"):
        prepare(several("books", "code", tokenizer=bpe))  # another tokenizer: it would be trained on less


def test_several_are_gone_on_with_to_the_same_bytes(several, tmp_path, monkeypatch):
    bpe = {"kind": "bpe", "vocab_size": 300}
    prepare(several(tokenizer=bpe, store=str(tmp_path / "whole")))

    def fail(stage, *rest):
        if stage == "encode code":
            raise ConnectionError

    with pytest.raises(ConnectionError):
        prepare(several(tokenizer=bpe), on_progress=fail)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["1-books"]
    monkeypatch.setattr("meshwright.data.prepare.train_bpe", fail)
    prepare(several(tokenizer=bpe))
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_a_validation_source_goes_with_the_first_store(several, tmp_path):
    write_corpus(tmp_path / "held-out", documents=7, seed=9)
    known = (tmp_path / "talk" / "003.txt").read_text()
    (tmp_path / "held-out" / "known.txt").write_text(known)
    held_out = {"validation": str(tmp_path / "held-out")}
    corpus = prepare(several(**held_out))
    assert [store.split("validation").document_count for store in corpus.stores] == [8, 0, 0]
    assert [split.document_count for split in corpus.validation] == [8] and known in documents(
        corpus.stores[2], "train"
    )
    apart = prepare(several(**held_out, deduplicate=True, store=str(tmp_path / "apart")))
    assert [store.split("validation").document_count for store in apart.stores] == [8, 0, 0]
    assert [store.split("train").document_count for store in apart.stores] == [20, 30, 39]
    assert [store.manifest["duplicates"] for store in apart.stores] == [0, 0, 1]
    assert known not in documents(apart.stores[2], "train")


def test_a_prepared_store_may_be_one_of_several(several, make, tmp_path):
    bpe = {"kind": "bpe", "vocab_size": 300}
    ready = prepare(several("books", tokenizer=bpe, store=str(tmp_path / "ready"))).stores[0]
    listed = [{"source": str(ready.path)}, {"source": str(tmp_path / "code")}]
    corpus = prepare(mixed(make, listed, tokenizer=bpe))
    assert corpus.stores[0].path == ready.path and corpus.stores[1].path == tmp_path / "store" / "2-code"
    assert corpus.stores[1].manifest["tokenizer"] == ready.manifest["tokenizer"]
    with pytest.raises(UserError, match=r"was made with bpe of 300"):
        prepare(mixed(make, listed, tokenizer={"kind": "bytes"}))
    other = prepare(several("talk", tokenizer=bpe, store=str(tmp_path / "other"))).stores[0]
    with pytest.raises(UserError, match="have different tokenizers") as caught:
        prepare(mixed(make, [{"source": str(ready.path)}, {"source": str(other.path)}], tokenizer=bpe))
    assert "\n" not in str(caught.value)


def test_a_nanogpt_file_must_be_alone(make, tmp_path):
    np.array([15496, 995, 50256] * 20, np.uint16).tofile(tmp_path / "train.bin")
    write_corpus(tmp_path / "books")
    listed = [{"source": str(tmp_path / "train.bin")}, {"source": str(tmp_path / "books")}]
    with pytest.raises(UserError, match=r"data.train, source .*train.bin.*must be the only source"):
        prepare(mixed(make, listed, tokenizer={"kind": "tiktoken:gpt2"}))


def test_a_share_may_hold_out_nothing_of_a_small_source_but_not_of_all(make, tmp_path):
    write_corpus(tmp_path / "books", documents=60)
    write_corpus(tmp_path / "one", documents=1, seed=3)
    listed = [{"source": str(tmp_path / "one")}, {"source": str(tmp_path / "books")}]
    corpus = prepare(mixed(make, listed))
    assert [split.document_count > 0 for split in corpus.validation] == [True]
    with pytest.raises(UserError, match=r"data.validation = 1e-09: holds out no document of any source"):
        prepare(mixed(make, listed, validation=1e-9, store=str(tmp_path / "none")))


def test_manifests_name_what_the_store_was_made_from(several):
    corpus = prepare(several(tokenizer={"kind": "bpe", "vocab_size": 300}))
    made_from = json.loads((corpus.path / "manifest.json").read_text())["made_from"]
    described = [store.manifest["made_from"]["source"]["fingerprint"] for store in corpus.stores]
    assert made_from["tokenizer"] == {"kind": "bpe", "vocab_size": 300, "trained_on": described}
    assert Store.open(corpus.path).fingerprint == corpus.stores[0].fingerprint
