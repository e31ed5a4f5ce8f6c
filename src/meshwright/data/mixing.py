"""Which source each example comes from, exact over any stretch of them.

The weights of a stage become whole numbers a_1 … a_K whose sum is a period of D examples; periods follow one another,
all alike. The j-th example that source k has in a period (from 0) has its place at j D div a_k at the earliest, and
before ⌈(j + 1) D / a_k⌉. Places are given in turn to the source whose example must come soonest, which always works
out (a fractional schedule does, and so a whole one: Baruah et al., 1996, "Proportionate Progress"). So after any
number n of examples, each source has had n a_k / D of them, but for less than one.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from meshwright.errors import UserError

MOST_PERIOD = 1 << 16


class Stage:
    """A stretch of the list of examples in which weights stay as they are.

    Arguments:
        first: the number of its first example.
        shares: whole numbers, the examples of each source in a period.
        before: how many examples of each source come before this stage, `[K]`.
    """

    def __init__(self, first: int, shares: Sequence[int], before: np.ndarray) -> None:
        self.first = first
        self._shares = np.array(shares, np.int64)
        self._before = before
        self._source = schedule(shares)
        # How many of its own come before each place of a period.
        self._rank = np.empty(len(self._source), np.int64)
        for source, share in enumerate(shares):
            self._rank[self._source == source] = np.arange(share)

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each example of this stage, which source it is from, and how many of that source come before it."""
        period, at = np.divmod(numbers - self.first, len(self._source))
        sources = self._source[at]
        return sources, self._before[sources] + period * self._shares[sources] + self._rank[at]

    def counts(self, number: int) -> np.ndarray:
        """How many examples of each source come before example `number`: int64 `[K]`."""
        periods, at = divmod(number - self.first, len(self._source))
        rest = np.bincount(self._source[:at], minlength=len(self._shares))
        return self._before + periods * self._shares + rest


class Mixing:
    """The sources of an endless list of examples.

    Arguments:
        stages: the number of the first example of each stage, rising from 0, and the stage's whole shares.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._stages: list[Stage] = []
        before = np.zeros(len(stages[0][1]), np.int64)
        for first, shares in stages:
            before = self._stages[-1].counts(first) if self._stages else before
            self._stages.append(Stage(first, shares, before))
        self._firsts = np.array([stage.first for stage in self._stages])

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each example, its source and its index among that source's examples.

        Arguments:
            numbers: places in the list, int64 `[n]`.

        Returns:
            int64 `[n]` each.
        """
        which = np.searchsorted(self._firsts, numbers, side="right") - 1
        sources, indices = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        for stage in np.unique(which):
            here = which == stage
            sources[here], indices[here] = self._stages[stage].place(numbers[here])
        return sources, indices

    def counts(self, number: int) -> np.ndarray:
        """How many examples of each source come before example `number`: int64 `[K]`."""
        return self._stages[int(np.searchsorted(self._firsts, number, side="right")) - 1].counts(number)


def stages_of(weights: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, tuple[int, ...]]]:
    """The stages that sources' weights make, each with its first step and its whole shares.

    Arguments:
        weights: of each source, the weights and the step from which each counts; a source has weight 0 before its
            first one.

    Returns:
        The stages by step, the first from step 0.

    Raises:
        UserError: a source's steps don't rise, or all weights of a stage are 0.
    """
    for source in weights:
        for (step, _), (following, _) in itertools.pairwise(source):
            if following <= step:
                raise UserError(
                    f"data.train: a source has a weight from step {following} after one from step {step}; write "
                    "`later` in the order of its steps, each above 0 and there once"
                )
    stages = []
    for step in sorted({0, *(step for source in weights for step, _ in source)}):
        current = [next((weight for start, weight in reversed(source) if start <= step), 0.0) for source in weights]
        if not any(current):
            raise UserError(f"data.train: all weights are 0 from step {step}; give a source a weight there")
        stages.append((step, whole_shares(current)))
    return stages


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers: exactly in proportion where their sum can stay within 65,536, else as near as it can.

    Arguments:
        weights: at least 0, and not all 0; taken as the decimal fractions that they are written as.

    Returns:
        As many numbers; one is 0 only where its weight is.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_PERIOD:
        return tuple(int(share * period) for share in shares)
    wished = [share * MOST_PERIOD for share in shares]
    whole = [max(math.floor(wish), 1) if wish else 0 for wish in wished]
    by_need = sorted(range(len(whole)), key=lambda source: whole[source] - wished[source])
    missing = MOST_PERIOD - sum(whole)
    for source in by_need[: max(missing, 0)]:
        whole[source] += 1
    whole[whole.index(max(whole))] += min(missing, 0)
    return tuple(whole)


def schedule(shares: Sequence[int]) -> np.ndarray:
    """The source of each place of a period.

    Arguments:
        shares: how many places each source has.

    Returns:
        int64 `[sum(shares)]`. Among its first n, source k has n a_k / D places but for less than one.
    """
    period = sum(shares)
    earliest, latest, sources = [], [], []
    for source, share in enumerate(shares):
        each = np.arange(share, dtype=np.int64)
        earliest.append(each * period // max(share, 1))
        latest.append(-(-(each + 1) * period // max(share, 1)))
        sources.append(np.full(share, source))
    by_time = np.argsort(np.concatenate(earliest), kind="stable")
    columns = (np.concatenate(column)[by_time].tolist() for column in (latest, earliest, sources))
    coming = list(zip(*columns, strict=True))
    queue: list[tuple[int, int, int]] = []  # of two that must come as soon, the one that has waited longer goes first
    places, following = [], 0
    for place in range(period):
        while following < period and coming[following][1] <= place:
            heapq.heappush(queue, coming[following])
            following += 1
        places.append(heapq.heappop(queue)[2])
    return np.array(places, np.int64)
