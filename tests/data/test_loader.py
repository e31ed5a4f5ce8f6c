import itertools
import threading

import numpy as np
import pytest
from small_stores import write_store

from meshwright.data.loader import batch_at, eval_batches, train_batches
from meshwright.errors import UserError

STEPS, ROWS, LENGTH = 12, 4, 8


@pytest.fixture
def store(tmp_path):
    choose = np.random.default_rng(0)
    documents = [choose.integers(0, 256, choose.integers(1, 30)).tolist() for _ in range(40)]
    return write_store(tmp_path / "made", documents, documents[:5])


@pytest.fixture(params=["stream", "padded"])
def run(request, make):
    train = {"steps": STEPS, "batch_size": ROWS, "sequence_length": LENGTH}
    return make("anywhere", data={"packing": request.param}, train=train)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_loader_gives_the_pure_function(store, run):
    batches = list(train_batches(store, run, 0))
    assert len(batches) == STEPS and batches[0].inputs_BT.shape == (ROWS, LENGTH)
    assert all(same(batch, batch_at(store, run, step)) for step, batch in enumerate(batches))
    assert not any(same(one, other) for one, other in itertools.combinations(batches, 2))


@pytest.mark.parametrize("start", [1, 7, STEPS - 1, STEPS])
def test_the_loader_starts_at_any_step(store, run, start):
    rest = list(train_batches(store, run, start))
    assert len(rest) == STEPS - start
    assert all(same(batch, batch_at(store, run, start + i)) for i, batch in enumerate(rest))


def test_the_rows_of_processes_make_the_global_batch(store, run):
    whole = batch_at(store, run, 3)
    for processes in (1, 2, 4):
        size = ROWS // processes
        parts = [next(train_batches(store, run, 3, slice(i * size, (i + 1) * size))) for i in range(processes)]
        assert same([np.concatenate(part) for part in zip(*parts, strict=True)], whole)
    assert not np.array_equal(whole.inputs_BT[0], whole.inputs_BT[1])


def test_the_seed_matters_and_steps_do_not(store, run):
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 99})})
    assert same(batch_at(store, run, 5), batch_at(store, longer, 5))
    assert not same(batch_at(store, run, 5), batch_at(store, run.model_copy(update={"seed": 1}), 5))


def test_an_abandoned_loader_stops_its_threads(store, run):
    before = threading.active_count()
    batches = train_batches(store, run, 0)
    next(batches)
    batches.close()
    for thread in threading.enumerate():
        if "grain" in thread.name:
            thread.join(10)
    assert threading.active_count() <= before


def _evaluation(run, **train):
    return run.model_copy(update={"train": run.train.model_copy(update=train)})


def test_evaluation_is_fixed_and_repeats_nothing(store, run):
    split = store.split("validation")
    count = (split.token_count - 1) // LENGTH if run.data.packing == "stream" else split.document_count
    batches = list(eval_batches(store, _evaluation(run, eval_batches=50)))
    assert len(batches) == -(-count // ROWS)
    assert all(batch.inputs_BT.shape == batch.weights_BT.shape == (ROWS, LENGTH) for batch in batches)
    rows = [tuple(row) for batch in batches for row in batch.inputs_BT]
    assert len(set(rows[:count])) == count
    weights = np.concatenate([batch.weights_BT for batch in batches])
    assert weights[:count].any(axis=1).all() and not weights[count:].any() and len(weights) > count
    again = list(eval_batches(store, _evaluation(run, eval_batches=50).model_copy(update={"seed": 5})))
    assert all(same(one, other) for one, other in zip(batches, again, strict=True))
    few = list(eval_batches(store, _evaluation(run, eval_batches=1)))
    assert len(few) == 1 and same(few[0], batches[0])


def test_too_short_splits_are_refused_at_the_call(store, run, tmp_path):
    empty = write_store(tmp_path / "short", [[]])
    with pytest.raises(UserError, match="train split"):
        train_batches(empty, run, 0)
    with pytest.raises(UserError, match="validation split"):
        eval_batches(empty, run)
