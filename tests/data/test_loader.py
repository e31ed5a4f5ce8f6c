import itertools
import threading

import numpy as np
import pytest
from small_stores import corpus_of, write_store

from meshwright.data.examples import Batch
from meshwright.data.loader import TrainData, eval_batches
from meshwright.errors import UserError

STEPS, ROWS, LENGTH = 12, 4, 8


def documents(seed: int, many: int = 40) -> list[list[int]]:
    choose = np.random.default_rng(seed)
    return [choose.integers(0, 256, choose.integers(1, 30)).tolist() for _ in range(many)]


@pytest.fixture
def corpus(tmp_path):
    return corpus_of(write_store(tmp_path / "made", documents(0), documents(0, 5)))


@pytest.fixture
def mixed(tmp_path):
    stores = [write_store(tmp_path / name, documents(seed), documents(seed, 5)) for seed, name in enumerate("abc")]
    return corpus_of(*stores, weights=[[(0, 0.7)], [(0, 0.2), (6, 1.1)], [(0, 0.0), (4, 0.6)]])


@pytest.fixture(params=["stream", "padded", "packed"])
def run(request, make):
    train = {"steps": STEPS, "batch_size": ROWS, "sequence_length": LENGTH}
    return make("anywhere", data={"packing": request.param}, train=train)


def changed(run, **train):
    return run.model_copy(update={"train": run.train.model_copy(update=train)})


def same(one: Batch, other: Batch) -> bool:
    return all((a is b is None) or np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def batch_at(corpus, run, step: int) -> Batch:
    return TrainData(corpus, run).batch(step)


def joined(parts: list[Batch]) -> Batch:
    return Batch._make(None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("which", ["corpus", "mixed"])
def test_the_loader_gives_the_pure_function(which, run, request):
    corpus = request.getfixturevalue(which)
    batches = list(TrainData(corpus, run).batches(0))
    assert len(batches) == STEPS and batches[0].inputs_BT.shape == (ROWS, LENGTH)
    assert all(same(batch, batch_at(corpus, run, step)) for step, batch in enumerate(batches))
    assert not any(same(one, other) for one, other in itertools.combinations(batches, 2))


@pytest.mark.parametrize("start", [1, 7, STEPS - 1, STEPS])
def test_the_loader_starts_at_any_step(mixed, run, start):
    rest = list(TrainData(mixed, run).batches(start))
    assert len(rest) == STEPS - start
    assert all(same(batch, batch_at(mixed, run, start + i)) for i, batch in enumerate(rest))


def test_the_rows_of_processes_make_the_global_batch(mixed, run):
    whole = batch_at(mixed, run, 3)
    for processes in (1, 2, 4):
        size = ROWS // processes
        data = TrainData(mixed, run)
        parts = [next(data.batches(3, slice(i * size, (i + 1) * size))) for i in range(processes)]
        assert same(joined(parts), whole)
    assert not np.array_equal(whole.inputs_BT[0], whole.inputs_BT[1])


def test_the_seed_matters_and_steps_do_not(corpus, run):
    assert same(batch_at(corpus, run, 5), batch_at(corpus, changed(run, steps=99), 5))
    assert not same(batch_at(corpus, run, 5), batch_at(corpus, run.model_copy(update={"seed": 1}), 5))


def test_one_source_is_read_in_the_order_it_always_was(tmp_path, make):
    """Pinned: batches of this store as they were before there were several sources."""
    corpus = corpus_of(write_store(tmp_path / "plain", [list(range(10 * i, 10 * i + 9)) for i in range(20)]))
    run = make("x", train={"batch_size": 3, "sequence_length": 9}, seed=3)
    firsts = [batch_at(corpus, run, step).inputs_BT[:, 0].tolist() for step in range(9)]
    assert firsts == [
        *([36, 153, 144], [63, 256, 27], [162, 171, 180], [0, 18, 117], [126, 72, 256], [90, 81, 54]),
        *([256, 108, 135], [45, 126, 256], [135, 63, 256]),
    ]


def test_an_abandoned_loader_stops_its_threads(corpus, run):
    before = threading.active_count()
    batches = TrainData(corpus, run).batches(0)
    next(batches)
    batches.close()
    for thread in threading.enumerate():
        if "grain" in thread.name:
            thread.join(10)
    assert threading.active_count() <= before


def test_evaluation_is_fixed_and_repeats_nothing(corpus, run):
    split = corpus.stores[0].split("validation")
    count = {"stream": (split.token_count - 1) // LENGTH, "padded": split.document_count}.get(run.data.packing)
    batches = list(eval_batches(corpus, changed(run, eval_batches=50)))
    weights = np.concatenate([batch.weights_BT for batch in batches])
    count = count or int(weights.any(axis=1).sum())
    assert len(batches) == -(-count // ROWS)
    assert all(batch.inputs_BT.shape == batch.weights_BT.shape == (ROWS, LENGTH) for batch in batches)
    rows = [tuple(row) for batch in batches for row in batch.inputs_BT]
    assert len(set(rows[:count])) == count
    assert weights[:count].any(axis=1).all() and not weights[count:].any() and len(weights) > count
    again = list(eval_batches(corpus, changed(run, eval_batches=50).model_copy(update={"seed": 5})))
    assert all(same(one, other) for one, other in zip(batches, again, strict=True))
    few = list(eval_batches(corpus, changed(run, eval_batches=1)))
    assert len(few) == 1 and same(few[0], batches[0])


def test_evaluation_reads_the_validation_splits_of_all_sources(mixed, run):
    both = changed(run, eval_batches=100)
    found = [row for batch in eval_batches(mixed, both) for row in batch.inputs_BT[batch.weights_BT.any(axis=1)]]
    alone = [
        row
        for store in mixed.stores
        for batch in eval_batches(corpus_of(store), both)
        for row in batch.inputs_BT[batch.weights_BT.any(axis=1)]
    ]
    assert sorted(map(tuple, found)) == sorted(map(tuple, alone)) != []
    mine = [next(eval_batches(mixed, both, np.array(rows))) for rows in ([0, 2], [1, 3])]
    whole = next(eval_batches(mixed, both))
    assert same(mine[0], Batch._make(None if part is None else part[[0, 2]] for part in whole))
    assert same(mine[1], Batch._make(None if part is None else part[[1, 3]] for part in whole))


def test_a_validation_split_too_short_for_an_example_is_passed_over(tmp_path, corpus, make):
    short = write_store(tmp_path / "short", documents(3), [[1, 2]])
    run = make("x", train={"batch_size": ROWS, "sequence_length": LENGTH, "eval_batches": 50})
    alone, beside = (list(eval_batches(one, run)) for one in (corpus, corpus_of(short, corpus.stores[0])))
    assert len(alone) == len(beside) and all(same(one, other) for one, other in zip(alone, beside, strict=True))
    with pytest.raises(UserError, match=r"longer than the store's validation split \(3 tokens"):
        eval_batches(corpus_of(short), run)


def test_too_short_splits_are_refused_at_the_call(run, tmp_path):
    empty = corpus_of(write_store(tmp_path / "short", [[]]))
    with pytest.raises(UserError, match="train split"):
        TrainData(empty, run)
    with pytest.raises(UserError, match="validation split"):
        eval_batches(empty, run)


def test_what_was_taken_is_counted_by_source(corpus, mixed, run):
    one, several = TrainData(corpus, run), TrainData(mixed, run)
    examples = one.taken(3)["epochs"] * len(one._examples[0])
    assert one.taken(0) == {"epochs": 0.0} and examples == pytest.approx(3 * ROWS)
    taken = several.taken(STEPS)
    assert list(taken) == [f"{key}/{name}" for key in ("epochs", "tokens") for name in "abc"]
    sources = np.concatenate([several._order.rows(step)[0] for step in range(STEPS)])
    for source, name in enumerate("abc"):
        many, length = int((sources == source).sum()), len(several._examples[source])
        assert taken[f"epochs/{name}"] == pytest.approx(many / length)
        mean = LENGTH * (1 - several._examples[source].padding)
        assert taken[f"tokens/{name}"] == pytest.approx(many * mean)
    assert several.taken(4)["tokens/c"] == 0 < several.taken(5)["tokens/c"]
    whole = one._examples[0].batch(np.arange(len(one._examples[0])))
    assert one.padding == pytest.approx(1 - whole.weights_BT.mean(), abs=1e-6)


def test_a_plan_that_cannot_be_read_is_never_passed_over(mixed, make):
    run = make("x", data={"packing": "packed"}, train={"batch_size": ROWS, "sequence_length": LENGTH})
    list(eval_batches(mixed, run))
    (mixed.stores[1].path / f"packed_{LENGTH}" / "validation" / "ends.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"packed_8/validation: can't be read"):
        eval_batches(mixed, run)
