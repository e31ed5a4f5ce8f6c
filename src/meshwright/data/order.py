"""The order of examples, as index arithmetic with no state.

Row r of step s is example number n = s · batch_size + r of an endless list. With N examples, number n falls in epoch
e = n div N at position p = n mod N, and is example π(seed, e)(p), where π is a keyed permutation of 0 … N-1 (Grain's
index shuffle: a block cipher on the index, so no list is stored and any n costs the same). Each epoch visits each
example once, in another order.
"""

import numpy as np


class Order:
    """Which example each row of each step is.

    Arguments:
        examples: N, at least 1 and at most 2^32.
        seed: the run's seed.
    """

    def __init__(self, examples: int, seed: int) -> None:
        import grain

        self._numbers = grain.MapDataset.range(examples).seed(seed).shuffle().repeat()
        # What Grain sets up on first use isn't thread-safe, and the loader's threads come next.
        self._numbers[0]

    def indices(self, step: int, batch_size: int) -> np.ndarray:
        """The examples of a step's global batch: int64 `[batch_size]`."""
        first = step * batch_size
        return np.array([self._numbers[n] for n in range(first, first + batch_size)], np.int64)
