import numpy as np
import pytest
from small_stores import write_store

from meshwright.data import writer
from meshwright.data.examples import Padded, Stream, open_examples
from meshwright.errors import UserError

E = 256


def test_stream_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 3)
    train = write_store(tmp_path / "store", [[1, 2, 3], [4], [5, 6]]).split("train")  # 1 2 3 E 4 E 5 6 E
    stream = Stream(train, 3)
    assert len(stream) == 2
    rows = [[part.tolist() for part in stream.example(i)] for i in range(2)]
    assert rows == [[[1, 2, 3], [2, 3, E], [1, 1, 1]], [[E, 4, E], [4, E, 5], [1, 1, 1]]]
    assert len(Stream(train, 8)) == 1 and len(Stream(train, 4)) == 2


def test_every_token_but_the_first_is_a_target_once(tmp_path):
    train = write_store(tmp_path / "store", [list(range(100))]).split("train")
    stream = Stream(train, 10)
    targets = np.concatenate([stream.example(i)[1] for i in range(len(stream))])
    assert targets.tolist() == [*range(1, 100), E]


def test_padded_by_hand(tmp_path):
    train = write_store(tmp_path / "store", [[1, 2, 3, 4, 5], [], [6], [7, 8]]).split("train")
    padded = Padded(train, 3)
    assert len(padded) == 3 and padded.left_out == 1
    rows = [[part.tolist() for part in padded.example(i)] for i in range(3)]
    assert rows == [
        [[1, 2, 3], [2, 3, 4], [1, 1, 1]],
        [[6, E, E], [E, E, E], [1, 0, 0]],
        [[7, 8, E], [8, E, E], [1, 1, 0]],
    ]


@pytest.mark.parametrize("packing", ["stream", "padded"])
def test_a_batch_is_its_examples(tmp_path, packing):
    train = write_store(tmp_path / "store", [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]).split("train")
    examples = open_examples(train, packing, 3)
    batch = examples.batch(np.array([2, 0, 2]))
    assert [part.dtype for part in batch] == [np.int32, np.int32, np.float32]
    assert all(part.shape == (3, 3) and part.flags["C_CONTIGUOUS"] for part in batch)
    for row, index in enumerate([2, 0, 2]):
        for part, one in zip(batch, examples.example(index), strict=True):
            assert np.array_equal(part[row], one)
    assert not np.array_equal(batch.inputs_BT[0], batch.inputs_BT[1])


def test_too_short_a_split_is_a_clear_line(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2, 3]])
    assert len(Stream(store.split("train"), 3)) == 1
    with pytest.raises(UserError, match=r"train.sequence_length = 4: longer than the store's train split \(4 tokens"):
        Stream(store.split("train"), 4)
    with pytest.raises(UserError, match=r"validation split \(0 tokens, .* raise data.validation"):
        Stream(store.split("validation"), 4)
    with pytest.raises(UserError, match=r"validation split has no document"):
        Padded(store.split("validation"), 4)
