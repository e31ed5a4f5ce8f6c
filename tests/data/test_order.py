import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import Order

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**40)


@settings(deadline=None, max_examples=50)
@given(examples=sizes, seed=seeds, epoch=st.integers(0, 5))
def test_each_epoch_visits_each_example_once(examples, seed, epoch):
    order = Order(examples, seed)
    assert sorted(order.indices(epoch, examples)) == list(range(examples))


@settings(deadline=None, max_examples=25)
@given(examples=sizes, seed=seeds, batch=st.integers(1, 40), step=st.integers(0, 30))
def test_any_step_is_what_reading_in_turn_gives(examples, seed, batch, step):
    in_turn = Order(examples, seed).indices(0, batch * (step + 1))
    assert np.array_equal(Order(examples, seed).indices(step, batch), in_turn[-batch:])


def test_epochs_and_seeds_differ():
    order = Order(100, 0)
    epochs = {tuple(order.indices(epoch, 100)) for epoch in range(5)}
    seeds = {tuple(Order(100, seed).indices(0, 100)) for seed in range(5)}
    assert len(epochs) == len(seeds) == 5
    assert tuple(range(100)) not in epochs | seeds
    # A seed's second epoch isn't the next seed's first.
    assert len(epochs & seeds) == 1


def test_the_shuffle_mixes():
    places = np.array([Order(50, seed).indices(0, 50)[0] for seed in range(100)])
    assert len(set(places)) > 30 and abs(places.mean() - 24.5) < 6


def test_far_steps_are_within_reach():
    indices = Order(3_000_000_000, 1).indices(10**9, 4)
    assert indices.dtype == np.int64 and (indices >= 0).all() and (indices < 3_000_000_000).all()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_is_pinned(seed):
    # A new Grain must not reorder the data of a run that is under way.
    pinned = {
        0: [1, 2, 4, 5, 9, 7, 8, 6, 0, 3, 9, 6, 1, 8, 2, 0, 3, 5, 4, 7],
        7: [7, 9, 0, 8, 4, 2, 5, 6, 3, 1, 6, 0, 4, 2, 7, 9, 1, 5, 8, 3],
    }
    assert Order(10, seed).indices(0, 20).tolist() == pinned[seed]
