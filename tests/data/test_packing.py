import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import corpus_of, write_store

from meshwright.data import packing
from meshwright.data.examples import Packed
from meshwright.data.packing import best_fit, ensure_packed, prepare_packing
from meshwright.errors import UserError

E = 256


def lengths_of_documents(many: int = 20_000, seed: int = 0) -> np.ndarray:
    """As those of web pages are: log-normal, the median 400 tokens."""
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 1.1, many).astype(np.int64), 1, None)


def pieces_of(documents: np.ndarray, room: int) -> np.ndarray:
    whole, rest = np.divmod(documents, room)
    return np.concatenate([np.append(np.full(many, room), part) for many, part in zip(whole, rest, strict=True)])


def padding(pieces: np.ndarray, bins: int, room: int) -> float:
    return 1 - pieces.sum() / (bins * room)


def first_fit_bins(pieces: np.ndarray, room: int) -> int:
    """In the order they come, each into the first bin that has room."""
    left = np.full(len(pieces), room)
    for piece in pieces:
        left[np.argmax(left >= piece)] -= piece
    return int((left < room).sum())


@settings(deadline=None, max_examples=100)
@given(data=st.data(), room=st.integers(1, 70))
def test_no_bin_is_overfull_and_none_is_empty(data, room):
    pieces = np.array(data.draw(st.lists(st.integers(1, room), min_size=1, max_size=200)))
    places, bins = best_fit(pieces, room)
    used = np.bincount(places, weights=pieces, minlength=bins)
    assert len(used) == bins and used.min() >= 1 and used.max() <= room
    assert (np.sort(used)[:2].sum() > room) or bins == 1  # or two bins could have been one


def best_fit_slowly(pieces: list[int], room: int) -> int:
    left: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [bin for bin in range(len(left)) if left[bin] >= piece]
        if not fitting:
            left.append(room)
            fitting = [len(left) - 1]
        left[min(fitting, key=lambda bin: left[bin])] -= piece
    return len(left)


@settings(deadline=None, max_examples=50)
@given(pieces=st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_it_takes_as_many_bins_as_best_fit_done_piece_by_piece(pieces):
    assert best_fit(np.array(pieces), 30)[1] == best_fit_slowly(pieces, 30)


def test_less_is_wasted_than_by_first_fit_in_order():
    room = 1024
    pieces = pieces_of(lengths_of_documents(2000), room)
    pieces = pieces[pieces > 0]
    best, first = (padding(pieces, bins, room) for bins in (best_fit(pieces, room)[1], first_fit_bins(pieces, room)))
    assert best < 0.01 < first


def test_millions_of_pieces_are_planned_in_seconds():
    pieces = pieces_of(lengths_of_documents(100_000), 2048)
    pieces = pieces[pieces > 0]
    start = time.process_time()
    best_fit(pieces, 2048)
    assert (time.process_time() - start) / len(pieces) < 3e-6


def documents(many: int = 60, seed: int = 0) -> list[list[int]]:
    choose = np.random.default_rng(seed)
    made = [choose.integers(0, 256, choose.integers(1, 40)).tolist() for _ in range(many)]
    return [*made[:20], [], *made[20:], choose.integers(0, 256, 100).tolist()]  # an empty one and a long one


@pytest.fixture(params=["one window", "windows"])
def store(request, tmp_path, monkeypatch):
    if request.param == "windows":
        monkeypatch.setattr(packing, "WINDOW", 9)
    return write_store(tmp_path / "store", documents(), documents(5, seed=1))


@pytest.mark.parametrize("length", [1, 7, 16, 64, 200])
def test_every_token_but_the_first_of_its_document_is_a_target_once(store, length):
    split = store.split("train")
    packed = Packed(split, length, ensure_packed(store, "train", length), document_mask=True)
    batch = packed.batch(np.arange(len(packed)))
    found = []
    for row in range(len(packed)):
        segments = batch.segments_BT[row]
        counts = batch.weights_BT[row] == 1
        assert np.array_equal(counts, segments > 0)
        assert np.unique(segments[counts]).tolist() == list(range(1, segments.max() + 1))
        assert (np.diff(segments[counts]) >= 0).all()
        assert not counts[counts.sum() :].any()  # padding comes last
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert batch.positions_BT[row][here].tolist() == list(range(here.sum()))
            inputs, targets = batch.inputs_BT[row][here].tolist(), batch.targets_BT[row][here].tolist()
            assert inputs[1:] == targets[:-1]
            found.append((inputs[0], *targets))
    expected = []
    for index in range(split.document_count):
        document = split.document(index).tolist()
        for start in range(0, len(document) - 1, length):
            expected.append(tuple(document[start : start + length + 1]))
    assert sorted(found) == sorted(expected) and max(map(len, expected)) == min(length, 100) + 1
    assert packed.padding == pytest.approx(1 - batch.weights_BT.mean(), abs=1e-6)


def test_a_plan_is_made_once_and_is_the_same_in_memory(tmp_path):
    written, bare = (write_store(tmp_path / name, documents()) for name in ("written", "bare"))
    (bare.path / "packed_16").write_text("in the way, as a folder that can't be written to would be")
    plan, in_memory = ensure_packed(written, "train", 16), ensure_packed(bare, "train", 16)
    assert plan.padding == in_memory.padding
    assert all(np.array_equal(one, other) for one, other in zip(plan[:3], in_memory[:3], strict=True))
    folder = written.path / "packed_16" / "train"
    assert sorted(path.name for path in folder.iterdir()) == ["ends.bin", "plan.json", "starts.bin", "targets.bin"]
    assert json.loads((folder / "plan.json").read_text())["padding"] == plan.padding
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert np.array_equal(ensure_packed(written, "train", 16).starts, plan.starts)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert (bare.path / "packed_16").is_file()


def test_what_a_killed_process_left_is_made_anew(tmp_path):
    store = write_store(tmp_path / "store", documents())
    left = store.path / "packed_16" / "train.partial"
    left.mkdir(parents=True)
    (left / "starts.bin").write_bytes(b"half")
    assert len(ensure_packed(store, "train", 16).ends)
    assert not left.exists()


def test_of_several_at_once_one_makes_the_plan(tmp_path, monkeypatch):
    store, made = write_store(tmp_path / "store", documents(400)), []
    write = packing._write
    monkeypatch.setattr(packing, "_write", lambda *arguments: (made.append(1), time.sleep(0.1), write(*arguments)))
    with ThreadPoolExecutor(3) as pool:
        plans = list(pool.map(lambda _: ensure_packed(store, "train", 16).starts.tolist(), range(3)))
    assert plans[0] == plans[1] == plans[2] and len(plans[0]) > 10
    assert made == [1]
    assert sorted(path.name for path in (store.path / "packed_16").iterdir()) == [".lock", "train"]


def test_a_plan_that_is_not_the_stores_is_refused(tmp_path):
    one, other = write_store(tmp_path / "1", documents()), write_store(tmp_path / "2", documents(seed=5))
    ensure_packed(one, "train", 16)
    (other.path / "packed_16").symlink_to(one.path / "packed_16")
    with pytest.raises(UserError, match=r"packed_16/train: the plan of another store, .*; remove .*packed_16 to have"):
        ensure_packed(other, "train", 16)
    starts = one.path / "packed_16" / "train" / "starts.bin"
    starts.write_bytes(starts.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"packed_16/train: can't be read \(starts.bin has another size"):
        ensure_packed(one, "train", 16)


def test_a_split_without_documents_has_an_empty_plan(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2], []])
    plan = ensure_packed(store, "validation", 16)
    assert len(plan.ends) == len(plan.starts) == 0 and plan.padding == 1.0
    with pytest.raises(UserError, match="validation split has no document"):
        Packed(store.split("validation"), 16, plan, document_mask=True)


def test_prepare_packing_makes_the_plans_of_all_stores(tmp_path, make):
    stores = [write_store(tmp_path / name, documents(seed=seed), [[1, 2]]) for seed, name in enumerate("ab")]
    prepare_packing(corpus_of(*stores), make("x", train={"sequence_length": 16}))
    assert not (stores[0].path / "packed_16").exists()
    prepare_packing(corpus_of(*stores), make("x", data={"packing": "packed"}, train={"sequence_length": 16}))
    made = [path.parent for store in stores for path in store.path.glob("packed_16/*/plan.json")]
    assert len(made) == 4
