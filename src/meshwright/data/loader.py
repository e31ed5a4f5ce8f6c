"""Batches: a pure function of (corpus, run, step), and the same read ahead by Grain's threads."""

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.examples import Batch, Examples, TooShort, gather, open_examples
from meshwright.data.order import BatchSizes, Order, Shuffle

# Reading is memory-mapped and light; a thread or two keep ahead of any step.
THREADS = 2
BATCHES_AHEAD = 8


class TrainData:
    """The training examples of a run, in their order.

    Arguments:
        corpus: the prepared data.
        run: of it `seed`, `data.packing`, `data.document_mask`, `train.steps`, `train.batch_size` and
            `train.sequence_length` matter.
        batch_sizes: of the steps so far, where `train.batch_size` was changed on the way; None: it never was.

    Raises:
        UserError: a train split is too short for one example, or the sources' weights can't be used.
    """

    def __init__(self, corpus: Corpus, run: Run, batch_sizes: BatchSizes | None = None) -> None:
        self._run = run
        self._examples = [open_examples(store, "train", run) for store in corpus.stores]
        self._names = corpus.names
        many = [len(examples) for examples in self._examples]
        self._order = Order(many, run.seed, batch_sizes or [[0, run.train.batch_size]], corpus.weights)
        self._many = np.array(many)
        self._tokens = np.array([(1 - examples.padding) * run.train.sequence_length for examples in self._examples])

    @property
    def padding(self) -> float:
        """The share of places that hold no token, in an epoch of each source."""
        return 1 - float(self._tokens @ self._many) / (self._run.train.sequence_length * int(self._many.sum()))

    def batch(self, step: int, rows: np.ndarray | slice | None = None) -> Batch:
        """The batch of one step; it depends on nothing but the corpus, the run's seed, batch sizes and the step.

        Arguments:
            step: from 0.
            rows: which rows of the global batch; None: all.

        Returns:
            The rows asked for, `[B, T]` each.
        """
        return gather(self._examples, *self._order.rows(step, rows))

    def batches(self, start_step: int, rows: np.ndarray | slice | None = None) -> Iterator[Batch]:
        """The batches of the steps from `start_step` to the run's last, in order, read ahead.

        Arguments:
            start_step: the first step to come, from 0; starting in the middle costs nothing.
            rows: which rows of the global batch this process supplies; None: all.

        Returns:
            An iterator; that of step s equals `batch(s, rows)`.
        """
        import grain

        steps = grain.MapDataset.range(start_step, self._run.train.steps)
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
        iterator = iter(steps.map(lambda step: self.batch(int(step), rows)).to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()

    def taken(self, step: int) -> dict[str, float]:
        """What was read in the steps before one, for a training record.

        Returns:
            `epochs`, how often the training text was gone through; of several sources `epochs/<name>` and
            `tokens/<name>`. Tokens are of the examples' mean length, those that don't count in the loss included.
        """
        taken = self._order.taken(step)
        epochs, tokens = taken / self._many, taken * self._tokens
        if len(taken) == 1:
            return {"epochs": float(epochs[0])}
        by_name = {"epochs": epochs, "tokens": tokens}
        return {
            f"{key}/{name}": float(value)
            for key, values in by_name.items()
            for name, value in zip(self._names, values, strict=True)
        }


def eval_batches(corpus: Corpus, run: Run, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """The batches that every evaluation of a run reads: the same ones each time, no example twice.

    Those of several validation splits are shuffled together. A split too short for one example is passed over where
    another isn't.

    Arguments:
        corpus: the prepared data.
        run: the run.
        rows: which rows of each batch this process supplies; None: all.

    Returns:
        `train.eval_batches` batches of `train.batch_size` rows, or fewer where there are fewer examples; the last is
        then filled up with rows of weight 0.

    Raises:
        UserError: all validation splits are too short for one example (at the call).
    """
    examples: list[Examples] = []
    problem: TooShort | None = None
    for store in corpus.stores:
        try:
            examples.append(open_examples(store, "validation", run))
        except TooShort as error:
            problem = problem or error
    if problem and not examples:
        raise problem
    return _fixed(examples, run, np.arange(run.train.batch_size) if rows is None else rows)


def _fixed(examples: Sequence[Examples], run: Run, rows: np.ndarray) -> Iterator[Batch]:
    size, ends = run.train.batch_size, np.cumsum([len(one) for one in examples])
    shuffle, many = Shuffle(int(ends[-1]), seed=0), int(ends[-1])
    for first in range(0, min(run.train.eval_batches * size, many), size):
        # The shuffle goes on into a second epoch; an evaluation ends with the first.
        mine = first + rows
        numbers = shuffle(mine[mine < many])
        sources = np.searchsorted(ends, numbers, side="right")
        batch = gather(examples, sources, numbers - np.where(sources > 0, ends[sources - 1], 0))
        yield Batch._make(None if part is None else _filled(part, len(rows)) for part in batch)


def _filled(part: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([part, np.zeros((rows - len(part), part.shape[1]), part.dtype)])
