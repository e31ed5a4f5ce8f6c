"""The order of examples, as index arithmetic with no state.

Row r of step s is example number n = b + r of an endless list, where b is the sum of the batch sizes of the steps
before s: s · batch_size, unless the batch size was changed on the way. The mixing (`meshwright.data.mixing`) says which
source k number n is from, and that it is the m-th example taken from there; with one source m = n. With N examples in
the source, m falls in epoch e = m div N at position p = m mod N, and is example π(seed, k, e)(p), where π is a keyed
permutation of 0 … N-1 (Grain's index shuffle: a block cipher on the index, so no list is stored and any n costs the
same). Each epoch of a source visits each of its examples once, in another order.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.data.mixing import Mixing, stages_of

BatchSizes = Sequence[Sequence[int]]
"""The batch sizes of a run: `[from_step, size]` each, the first from step 0, steps rising."""

# Between the seeds of two sources: a prime near 2^32 divided by the golden ratio, so that no two come close.
_SEED_STRIDE = 2_654_435_761


class Shuffle:
    """One source's examples, epoch by epoch.

    Arguments:
        examples: N, at least 1 and at most 2^32.
        seed: keys the permutations.
    """

    def __init__(self, examples: int, seed: int) -> None:
        import grain

        self._numbers = grain.MapDataset.range(examples).seed(seed).shuffle().repeat()
        # What Grain sets up on first use isn't thread-safe, and the loader's threads come next.
        self._numbers[0]

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """The examples at these places of the endless list: int64 `[n]`."""
        return np.array([self._numbers[number] for number in numbers.tolist()], np.int64)


class Order:
    """Which example of which source each row of each step is.

    Arguments:
        examples: how many each source has.
        seed: the run's seed.
        weights: of each source, its weights and the steps from which they count; None: of one source.
        batch_sizes: of the steps so far, the last also of those to come.

    Raises:
        UserError: see `meshwright.data.mixing.stages_of`.
    """

    def __init__(
        self,
        examples: Sequence[int],
        seed: int,
        batch_sizes: BatchSizes,
        weights: Sequence[Sequence[tuple[int, float]]] | None = None,
    ) -> None:
        self._batch_sizes = batch_sizes
        self._shuffles = [
            Shuffle(many, seed if source == 0 else (seed + source * _SEED_STRIDE) % 2**32)
            for source, many in enumerate(examples)
        ]
        stages = stages_of(weights or [[(0, 1.0)]])
        self._mixing = Mixing([(first_example(batch_sizes, step), shares) for step, shares in stages])

    def rows(self, step: int, rows: np.ndarray | slice | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The examples of a step's global batch.

        Arguments:
            step: from 0.
            rows: which rows of it; None: all.

        Returns:
            The source of each row, and the index of its example there: int64 `[B]` each.
        """
        numbers = np.arange(first_example(self._batch_sizes, step), first_example(self._batch_sizes, step + 1))
        sources, taken = self._mixing.place(numbers if rows is None else numbers[rows])
        indices = np.empty_like(taken)
        for source in np.unique(sources):
            here = sources == source
            indices[here] = self._shuffles[source](taken[here])
        return sources, indices

    def taken(self, step: int) -> np.ndarray:
        """How many examples of each source come before a step: int64 `[K]`."""
        return self._mixing.counts(first_example(self._batch_sizes, step))


def first_example(batch_sizes: BatchSizes, step: int) -> int:
    """The number of the first example of a step: the sum of the sizes of the batches before it."""
    ends = [start for start, _ in batch_sizes[1:]] + [step]
    return sum(size * max(min(end, step) - start, 0) for (start, size), end in zip(batch_sizes, ends, strict=True))


def with_batch_size(batch_sizes: BatchSizes, step: int, size: int) -> list[list[int]]:
    """Batch sizes that go on from a step with this size.

    Arguments:
        batch_sizes: of the steps before; what it says of `step` and later ones is dropped.
        step: the first with this size.
        size: of its global batch.
    """
    before = [list(one) for one in batch_sizes if one[0] < step]
    return before if before and before[-1][1] == size else [*before, [step, size]]
