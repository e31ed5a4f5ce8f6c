import numpy as np
import pytest
from small_stores import write_store

from meshwright.data import writer
from meshwright.data.examples import Padded, Stream, gather, open_examples
from meshwright.errors import UserError

E = 256


def open_train(make, store, packing: str, length: int = 3, **data):
    return open_examples(
        store, "train", make("x", data={"packing": packing, **data}, train={"sequence_length": length})
    )


def rows(examples) -> list[list[list]]:
    """Each part of each example; those that aren't there left out."""
    batch = examples.batch(np.arange(len(examples)))
    return [[part[row].tolist() for part in batch if part is not None] for row in range(len(examples))]


def test_stream_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 3)
    train = write_store(tmp_path / "store", [[1, 2, 3], [4], [5, 6]]).split("train")  # 1 2 3 E 4 E 5 6 E
    stream = Stream(train, 3)
    assert len(stream) == 2
    assert rows(stream) == [[[1, 2, 3], [2, 3, E], [1, 1, 1]], [[E, 4, E], [4, E, 5], [1, 1, 1]]]
    assert len(Stream(train, 8)) == 1 and len(Stream(train, 4)) == 2


def test_every_token_but_the_first_is_a_target_once(tmp_path):
    train = write_store(tmp_path / "store", [list(range(100))]).split("train")
    stream = Stream(train, 10)
    assert stream.batch(np.arange(len(stream))).targets_BT.ravel().tolist() == [*range(1, 100), E]


def test_padded_by_hand(tmp_path):
    train = write_store(tmp_path / "store", [[1, 2, 3, 4, 5], [], [6], [7, 8]]).split("train")
    padded = Padded(train, 3)
    assert len(padded) == 3 and padded.left_out == 1
    assert rows(padded) == [
        [[1, 2, 3], [2, 3, 4], [1, 1, 1]],
        [[6, E, E], [E, E, E], [1, 0, 0]],
        [[7, 8, E], [8, E, E], [1, 1, 0]],
    ]
    assert padded.padding == pytest.approx(3 / 9)


def test_padded_leaves_out_conversations_cut_before_their_answer(tmp_path):
    late, early = [1, 2, 3, 4, 5, 6], [7, 8, 9]
    weights = [[0, 0, 0, 0, 1, 1], [0, 1, 1]]
    train = write_store(tmp_path / "store", [late, early], weights=weights).split("train")
    assert rows(Padded(train, 3)) == [[[7, 8, 9], [8, 9, E], [1, 1, 1]]]
    assert Padded(train, 3).left_out == 1 and len(Padded(train, 4)) == 2
    nothing = write_store(tmp_path / "other", [late], weights=weights[:1]).split("train")
    with pytest.raises(UserError, match=r"no document with anything to learn.*raise train.sequence_length"):
        Padded(nothing, 3)


def test_packed_by_hand(tmp_path, make):
    store = write_store(tmp_path / "store", [[1, 2, 3, 4, 5], [], [6], [7, 8]])  # 5 targets: 3 and 2; 1; 2
    packed = open_train(make, store, "packed")
    assert len(packed) == 3 and packed.padding == pytest.approx(1 / 9)
    assert rows(packed) == [
        [[1, 2, 3], [2, 3, 4], [1, 1, 1], [1, 1, 1], [0, 1, 2]],
        [[4, 5, 6], [5, E, E], [1, 1, 1], [1, 1, 2], [0, 1, 0]],
        [[7, 8, E], [8, E, E], [1, 1, 0], [1, 1, 0], [0, 1, 0]],
    ]
    whole_row = open_train(make, store, "packed", document_mask=False)
    assert rows(whole_row) == [row[:3] for row in rows(packed)]


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ("stream", [[0, 1, 1], [1, 1, 0], [0, 1, 0]]),
        ("padded", [[0, 1, 1], [1, 0, 0]]),
        ("packed", [[0, 1, 1], [1, 0, 0], [1, 0, 1]]),
    ],
)
def test_a_target_that_is_not_to_be_learned_has_no_weight(tmp_path, make, packing, expected):
    weights = [[0, 0, 1], [1, 1, 0, 0, 1, 0]]  # and 1 for each end of text
    store = write_store(tmp_path / "store", [[1, 2, 3], [4, 5, 6, 7, 8, 9]], weights=weights)
    assert [row[2] for row in rows(open_train(make, store, packing))] == expected


@pytest.mark.parametrize("packing", ["stream", "padded", "packed"])
def test_a_batch_is_its_examples(tmp_path, make, packing):
    store = write_store(tmp_path / "store", [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]])
    examples = open_train(make, store, packing)
    batch = examples.batch(np.array([2, 0, 2]))
    parts = [part for part in batch if part is not None]
    assert [part.dtype for part in parts] == [np.int32, np.int32, np.float32, np.int32, np.int32][: len(parts)]
    assert len(parts) == (5 if packing == "packed" else 3)
    assert all(part.shape == (3, 3) and part.flags["C_CONTIGUOUS"] for part in parts)
    for row, index in enumerate([2, 0, 2]):
        assert [part[row].tolist() for part in parts] == rows(examples)[index]
    assert not np.array_equal(batch.inputs_BT[0], batch.inputs_BT[1])


@pytest.mark.parametrize("packing", ["stream", "packed"])
def test_rows_of_several_sources_come_in_the_order_asked_for(tmp_path, make, packing):
    one = open_train(make, write_store(tmp_path / "1", [list(range(30))]), packing)
    other = open_train(make, write_store(tmp_path / "2", [list(range(100, 130))]), packing)
    batch = gather([one, other], np.array([1, 0, 1, 0]), np.array([2, 0, 0, 3]))
    assert batch.inputs_BT[:, 0].tolist() == [106, 0, 100, 9]
    assert (batch.segments_BT is None) == (packing == "stream")
    assert gather([one, other], np.array([1, 1]), np.array([0, 1])).inputs_BT[:, 0].tolist() == [100, 103]
    assert gather([one, other], np.array([], np.int64), np.array([], np.int64)).inputs_BT.shape == (0, 3)


def test_too_short_a_split_is_a_clear_line(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2, 3]])
    assert len(Stream(store.split("train"), 3)) == 1
    with pytest.raises(UserError, match=r"train.sequence_length = 4: longer than the store's train split \(4 tokens"):
        Stream(store.split("train"), 4)
    with pytest.raises(UserError, match=r"validation split \(0 tokens, .* raise data.validation"):
        Stream(store.split("validation"), 4)
    with pytest.raises(UserError, match=r"validation split has no document"):
        Padded(store.split("validation"), 4)
