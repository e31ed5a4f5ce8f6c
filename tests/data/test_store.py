import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import write_store

from meshwright.data import store as store_module
from meshwright.data import writer
from meshwright.data.store import Store, open_nanogpt
from meshwright.data.tokenizer import ByteTokenizer, open_tokenizer
from meshwright.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]
TOKENS = [1, 2, 3, 256, 4, 256, 5, 6, 256, 7, 8, 9, 10, 11, 256]


def test_reads_back_what_was_written(tmp_path):
    train = write_store(tmp_path / "store", DOCUMENTS).split("train")
    assert (train.token_count, train.document_count, train.byte_count) == (15, 4, 11)
    assert train.read(0, 15).tolist() == TOKENS and train.read(0, 15).dtype == np.int32
    assert [train.document(i).tolist() for i in range(4)] == [[*document, 256] for document in DOCUMENTS]
    raw = np.fromfile(tmp_path / "store" / "train_00000.bin", "<u2")
    assert raw.tolist() == TOKENS
    assert np.fromfile(tmp_path / "store" / "train_documents.bin", "<u8").tolist() == [4, 6, 9, 15]


@settings(deadline=None, max_examples=30)
@given(shard=st.integers(1, 16), start=st.integers(0, 15), length=st.integers(0, 15))
def test_reads_across_shards(tmp_path_factory, shard, start, length):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_TOKENS", shard)
        train = write_store(tmp_path_factory.mktemp("shards") / "store", DOCUMENTS).split("train")
    assert len(train._shards) == -(-15 // shard)
    if start + length <= 15:
        assert train.read(start, length).tolist() == TOKENS[start : start + length]
    else:
        with pytest.raises(IndexError):
            train.read(start, length)


def test_one_large_append_fills_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 4)
    folder = tmp_path / "store"
    write_store(folder, [list(range(10))])
    assert [path.stat().st_size // 2 for path in sorted(folder.glob("train_0*.bin"))] == [4, 4, 3]


def test_the_fingerprint_covers_tokens_and_borders(tmp_path):
    one = write_store(tmp_path / "1", [[1, 2], [3]]).fingerprint
    assert write_store(tmp_path / "2", [[1, 2], [3]]).fingerprint == one
    assert write_store(tmp_path / "3", [[1, 2], [4]]).fingerprint != one
    assert write_store(tmp_path / "4", [[1, 2]], [[3]]).fingerprint != one
    assert write_store(tmp_path / "5", [[1, 2, 256, 3]]).fingerprint != one  # the same tokens, one document


def test_weights_are_read_across_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 4)
    weights = [[0, 1, 0], [1], [0, 0], [1, 1, 1, 0, 1]]
    folder = tmp_path / "store"
    split = write_store(folder, DOCUMENTS, [[1]], weights).split("train")
    flat = [0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1]
    assert (
        split.is_weighted
        and split.read_weights(0, 15).tolist() == flat
        and split.read_weights(3, 7).tolist() == flat[3:10]
    )
    plain = Store.open(folder).split("validation")
    assert not plain.is_weighted and plain.read_weights(0, 2).tolist() == [1, 1]
    for one in (split, plain):
        with pytest.raises(IndexError):
            one.read_weights(1, 15)
    fingerprint = Store.open(folder).fingerprint
    weights[0][0] = 1
    assert write_store(tmp_path / "other", DOCUMENTS, [[1]], weights).fingerprint != fingerprint
    (folder / "train_00001.weights").unlink()
    with pytest.raises(UserError, match=r"train_00001.weights: missing"):
        Store.open(folder)


def test_a_writer_goes_on_from_a_state_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 4)
    parts = [np.arange(n, n + 3, dtype=np.uint16) for n in range(0, 30, 3)]

    def written(folder: Path, begun: writer.SplitWriter | None, chosen: list[np.ndarray]) -> writer.SplitWriter:
        folder.mkdir(exist_ok=True)
        one = begun or writer.SplitWriter(folder, "train", np.dtype(np.uint16), weighted=True)
        for part in chosen:
            one.append(part, [3], 3, (part % 2).astype(np.uint8))
        return one

    whole = written(tmp_path / "whole", None, parts).finish()
    for count in range(10):
        folder = tmp_path / str(count)
        first = written(folder, None, parts[:count])
        state = json.loads(json.dumps(first.commit()))
        written(folder, first, parts[count : count + 2]).close()  # and is lost
        again = writer.SplitWriter(folder, "train", np.dtype(np.uint16), weighted=True, state=state)
        assert written(folder, again, parts[count:]).finish() == whole
        assert all((folder / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "whole").iterdir())


def test_a_writer_refuses_to_go_on_with_less_than_was_committed(tmp_path):
    one = writer.SplitWriter(tmp_path, "train", np.dtype(np.uint16))
    one.append(np.arange(10), [10], 10)
    state = one.commit()
    one.close()
    _cut(tmp_path / "train_00000.bin")
    with pytest.raises(writer.Damaged):
        writer.SplitWriter(tmp_path, "train", np.dtype(np.uint16), state=state)


def test_an_empty_split_opens(tmp_path):
    split = write_store(tmp_path / "store", DOCUMENTS).split("validation")
    assert (split.token_count, split.document_count, split.byte_count) == (0, 0, 0)
    assert split.read(0, 0).tolist() == []


def test_what_is_not_whole_is_refused_by_name(tmp_path):
    def change(folder: Path, key: str, value: object) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))

    damages = {
        "no manifest.json": lambda folder: (folder / "manifest.json").unlink(),
        "can't be read": lambda folder: (folder / "manifest.json").write_text("{"),
        "a store of format 99": lambda folder: change(folder, "format", 99),
        "incomplete": lambda folder: change(folder, "complete", False),
        "train_00000.bin: missing": lambda folder: (folder / "train_00000.bin").unlink(),
        "train_00000.bin: 28 bytes, and the manifest says 30": lambda folder: _cut(folder / "train_00000.bin"),
        "train_documents.bin: 30 bytes": lambda folder: _cut(folder / "train_documents.bin"),
    }
    for number, (words, damage) in enumerate(damages.items()):
        folder = tmp_path / str(number)
        write_store(folder, DOCUMENTS)
        damage(folder)
        with pytest.raises(UserError, match=words) as caught:
            Store.open(folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"no manifest.json"):
        Store.open(tmp_path / "nowhere")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def test_a_swapped_tokenizer_is_refused(tmp_path):
    store = write_store(tmp_path / "store", DOCUMENTS)
    assert store.tokenizer().kind == "bytes"
    (tmp_path / "store" / "tokenizer" / "spec.json").write_text('{"kind": "tiktoken:gpt2"}')
    with pytest.raises(UserError, match="not the tokenizer that wrote the store"):
        Store.open(tmp_path / "store").tokenizer()


@pytest.fixture
def pair(tmp_path):
    gpt2 = open_tokenizer("tiktoken:gpt2")
    texts = {"train.bin": ["Hello world", "naïve 你好"], "val.bin": ["one two three", "ü"]}
    for name, documents in texts.items():
        ids = [token for text in documents for token in [*gpt2.encode(text), gpt2.end_of_text]]
        np.array(ids, np.uint16).tofile(tmp_path / name)
    return tmp_path / "train.bin", tmp_path / "val.bin", gpt2


def test_a_nanogpt_pair_opens_in_place(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SCAN_TOKENS", 3)
    before = sorted(path.name for path in tmp_path.iterdir())
    store = open_nanogpt(*pair)
    train, validation = store.split("train"), store.split("validation")
    assert train.read(0, 3).tolist() == [15496, 995, 50256]
    assert store.tokenizer() is pair[2]
    assert train.byte_count is None and validation.byte_count == len(b"one two three") + len("ü".encode())
    assert train.document_count == 2 and train.document(0).tolist() == [15496, 995, 50256]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_nanogpt_tail_without_end_of_text_is_a_document(pair):
    np.array([1, 2, 50256, 3], np.uint16).tofile(pair[0])
    train = open_nanogpt(*pair).split("train")
    assert [train.document(i).tolist() for i in range(train.document_count)] == [[1, 2, 50256], [3]]


def test_a_nanogpt_fingerprint_follows_the_content(pair):
    one = open_nanogpt(*pair).fingerprint
    assert open_nanogpt(*pair).fingerprint == one
    tokens = np.fromfile(pair[1], np.uint16)
    tokens[0] += 1
    tokens.tofile(pair[1])
    assert open_nanogpt(*pair).fingerprint != one


def test_wrong_nanogpt_files_are_refused(pair):
    train, validation, gpt2 = pair
    with pytest.raises(UserError, match=r"holds the id \d+, and bytes has 257"):
        open_nanogpt(train, validation, ByteTokenizer())
    with pytest.raises(UserError, match=r"data.validation = .*no such file"):
        open_nanogpt(train, validation.with_name("none.bin"), gpt2)
    validation.write_bytes(b"abc")
    with pytest.raises(UserError, match="3 bytes aren't whole uint16"):
        open_nanogpt(train, validation, gpt2)
