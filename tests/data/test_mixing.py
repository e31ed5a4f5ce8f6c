from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.mixing import MOST_PERIOD, Mixing, schedule, stages_of, whole_shares
from meshwright.errors import UserError

shares = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)
weights = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9).filter(any)


def counts_by_prefix(sources: np.ndarray, many: int) -> np.ndarray:
    """`[n + 1, K]`: how many examples of each source are among the first ones."""
    taken = (sources[:, None] == np.arange(many)).cumsum(axis=0)
    return np.concatenate([np.zeros((1, many), np.int64), taken])


@settings(deadline=None, max_examples=100)
@given(shares=shares)
@example(shares=[1, 1, 1, 1, 1, 1, 1, 93])
@example(shares=[0, 5, 0])
def test_every_prefix_is_within_one_of_exact_and_every_window_within_two(shares):
    numbers = np.arange(2 * sum(shares))
    sources, indices = Mixing([(0, shares)]).place(numbers)
    counts = counts_by_prefix(sources, len(shares))
    exact = np.arange(len(counts))[:, None] * (np.array(shares) / sum(shares))
    assert np.abs(counts - exact).max() < 1 - 1e-9
    off = counts - exact
    assert (off.max(axis=0) - off.min(axis=0)).max() < 2 - 1e-9  # any two prefixes bound a window
    assert (indices == counts[:-1][numbers, sources]).all()


@settings(deadline=None, max_examples=60)
@given(weights=weights)
@example(weights=[1e-9, 1.0])
@example(weights=[1e-9] * 8 + [1.0])
@example(weights=[1 / 3, 2 / 3])
def test_shares_are_the_weights_as_near_as_can_be(weights):
    whole = whole_shares(weights)
    assert sum(whole) <= MOST_PERIOD and [bool(share) for share in whole] == [bool(weight) for weight in weights]
    wished = np.array(weights) / sum(weights)
    assert np.abs(np.array(whole) / sum(whole) - wished).max() <= len(weights) / MOST_PERIOD


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.1, 0.2, 0.7], (1, 2, 7)), ([1, 1], (1, 1)), ([0.67, 0.045, 0.285], (134, 9, 57)), ([3.0, 0.0], (1, 0))],
)
def test_decimal_fractions_are_exact(weights, expected):
    assert whole_shares(weights) == expected
    assert sum(map(Fraction, expected)) == sum(expected)


def test_sources_alternate_rather_than_come_in_blocks():
    assert schedule((2, 1)).tolist() == [0, 1, 0]
    assert schedule((1, 1)).tolist() == [0, 1]
    assert len(set(schedule((1, 1, 2)).tolist()[:2])) == 2


def test_counts_go_on_from_stage_to_stage():
    mixing = Mixing([(0, (1, 1)), (7, (0, 1)), (12, (3, 1))])
    sources, indices = mixing.place(np.arange(60))
    assert set(sources[7:12]) == {1}
    assert np.bincount(sources[12:], minlength=2).tolist() == [36, 12]
    for source in (0, 1):  # each source's examples come in turn, none twice
        assert indices[sources == source].tolist() == list(range((sources == source).sum()))
    for number in (0, 3, 7, 9, 12, 13, 59):
        assert mixing.counts(number).tolist() == np.bincount(sources[:number], minlength=2).tolist()
    scattered = np.array([59, 0, 8, 13, 7])
    assert mixing.place(scattered)[1].tolist() == indices[scattered].tolist()


def test_far_examples_cost_no_more():
    (source,), (index,) = Mixing([(0, (1, 2))]).place(np.array([3 * 10**12 + 1]))
    assert index == {0: 10**12, 1: 2 * 10**12}[int(source)]


def test_stages_come_from_the_sources_weights():
    weights = [[(0, 1.0), (100, 0.0)], [(0, 0.0), (50, 3.0)], [(100, 1.0)]]
    assert stages_of(weights) == [(0, (1, 0, 0)), (50, (1, 3, 0)), (100, (0, 3, 1))]


def test_weights_that_cannot_be_used_are_a_clear_line():
    with pytest.raises(UserError, match=r"data\.train: all weights are 0 from step 50; give a source a weight there"):
        stages_of([[(0, 1.0), (50, 0.0)], [(0, 0.0)]])
    with pytest.raises(UserError, match=r"data\.train: all weights are 0 from step 0"):
        stages_of([[(10, 1.0)], [(0, 0.0)]])
    with pytest.raises(UserError, match=r"data\.train: a source has a weight from step 20 after one from step 30"):
        stages_of([[(0, 1.0), (30, 2.0), (20, 1.0)]])
