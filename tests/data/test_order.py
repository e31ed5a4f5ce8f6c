import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import Order, Shuffle, first_example, with_batch_size

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**31 - 1)


@settings(deadline=None, max_examples=25)
@given(examples=sizes, seed=seeds, epoch=st.integers(0, 3))
def test_each_epoch_visits_each_example_once(examples, seed, epoch):
    shuffle = Shuffle(examples, seed)
    assert sorted(shuffle(np.arange(epoch * examples, (epoch + 1) * examples))) == list(range(examples))


@settings(deadline=None, max_examples=25)
@given(examples=sizes, seed=seeds, batch=st.integers(1, 20), step=st.integers(0, 20))
def test_any_step_is_what_reading_in_turn_gives(examples, seed, batch, step):
    _, in_turn = Order([examples], seed, [[0, batch * (step + 1)]]).rows(0)
    sources, indices = Order([examples], seed, [[0, batch]]).rows(step)
    assert np.array_equal(indices, in_turn[-batch:]) and not sources.any()


def test_epochs_and_seeds_differ():
    shuffle = Shuffle(100, 0)
    epochs = {tuple(shuffle(np.arange(100 * epoch, 100 * epoch + 100))) for epoch in range(5)}
    seeds = {tuple(Shuffle(100, seed)(np.arange(100))) for seed in range(5)}
    assert len(epochs) == len(seeds) == 5
    assert tuple(range(100)) not in epochs | seeds
    # A seed's second epoch isn't the next seed's first.
    assert len(epochs & seeds) == 1


def test_the_shuffle_mixes():
    places = np.array([Shuffle(50, seed)(np.arange(1))[0] for seed in range(100)])
    assert len(set(places)) > 30 and abs(places.mean() - 24.5) < 6


def test_far_steps_are_within_reach():
    _, indices = Order([3_000_000_000], 1, [[0, 4]]).rows(10**9)
    assert indices.dtype == np.int64 and (indices >= 0).all() and (indices < 3_000_000_000).all()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_is_pinned(seed):
    # A new Grain must not reorder the data of a run that is under way.
    pinned = {
        0: [1, 2, 4, 5, 9, 7, 8, 6, 0, 3, 9, 6, 1, 8, 2, 0, 3, 5, 4, 7],
        7: [7, 9, 0, 8, 4, 2, 5, 6, 3, 1, 6, 0, 4, 2, 7, 9, 1, 5, 8, 3],
    }
    assert Order([10], seed, [[0, 20]]).rows(0)[1].tolist() == pinned[seed]
    assert Shuffle(10, seed)(np.arange(20)).tolist() == pinned[seed]


def test_the_order_of_several_sources_is_pinned():
    weights = [[(0, 1.0)], [(0, 0.5), (3, 2.0)]]
    rows = [Order([5, 7], 0, [[0, 4]], weights).rows(step) for step in range(5)]
    assert [" ".join(f"{source}:{index}" for source, index in zip(*row, strict=True)) for row in rows] == [
        "0:1 1:2 0:2 0:4",
        "1:0 0:0 0:3 1:6",
        "0:0 0:3 1:4 0:1",
        "1:5 0:4 1:1 1:3",
        "0:2 1:1 1:4 0:3",
    ]


def test_every_source_goes_through_its_own_epochs():
    order = Order([50, 50, 20], 3, [[0, 32]], [[(0, 1.0)], [(0, 1.0), (6, 0.0)], [(0, 0.5)]])
    rows = [order.rows(step) for step in range(40)]
    sources, indices = (np.concatenate(column) for column in zip(*rows, strict=True))
    for source, many in enumerate((50, 50, 20)):
        mine = indices[sources == source]
        assert len(mine) == order.taken(40)[source]
        for epoch in range(len(mine) // many):
            assert sorted(mine[epoch * many : (epoch + 1) * many]) == list(range(many))
    assert not (sources[6 * 32 :] == 1).any() and (sources[: 6 * 32] == 1).any()
    assert not np.array_equal(indices[sources == 0][:50], indices[sources == 1][:50])  # each in an order of its own


@settings(deadline=None, max_examples=50)
@given(changes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=6))
def test_batch_sizes_that_change_leave_out_nothing_and_repeat_nothing(changes):
    batch_sizes: list[list[int]] = []
    step = 0
    for steps, size in changes:
        batch_sizes = with_batch_size(batch_sizes, step, size)
        step += steps
    order = Order([1000], 0, batch_sizes)
    read = [index for each in range(step) for index in order.rows(each)[1]]
    assert len(read) == sum(steps * size for steps, size in changes) == first_example(batch_sizes, step)
    assert read == Shuffle(1000, 0)(np.arange(len(read))).tolist()


def test_a_history_grows_only_where_the_size_changes():
    assert with_batch_size([], 0, 4) == [[0, 4]]
    assert with_batch_size([[0, 4]], 7, 4) == [[0, 4]]
    assert with_batch_size([[0, 4]], 7, 8) == [[0, 4], [7, 8]]
    assert with_batch_size([[0, 4], [7, 8]], 7, 16) == [[0, 4], [7, 16]]  # resumed twice at the same step
    assert with_batch_size([[0, 4], [7, 8]], 5, 8) == [[0, 4], [5, 8]]  # from an older checkpoint


def test_a_stage_begins_with_the_first_example_of_its_step():
    weights = [[(0, 1.0), (3, 0.0)], [(0, 0.0), (3, 1.0)]]
    for batch_sizes in ([[0, 4]], [[0, 4], [2, 6]]):
        order = Order([100, 100], 0, batch_sizes, weights)
        assert [set(order.rows(step)[0].tolist()) for step in range(5)] == [{0}, {0}, {0}, {1}, {1}]


def test_rows_are_rows_of_the_batch():
    order = Order([30, 30], 0, [[0, 8]], [[(0, 1.0)], [(0, 3.0)]])
    whole = order.rows(5)
    for rows in (np.array([0, 1, 4, 5]), slice(2, 4), np.array([], np.int64)):
        for part, all_of_it in zip(order.rows(5, rows), whole, strict=True):
            assert np.array_equal(part, all_of_it[rows])
