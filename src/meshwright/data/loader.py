"""Batches: a pure function of (store, run, step), and the same read ahead by Grain's threads."""

from collections.abc import Iterator

import numpy as np

from meshwright.config import Run
from meshwright.data.examples import Batch, Padded, Stream, open_examples
from meshwright.data.order import Order
from meshwright.data.store import Store

# Reading is memory-mapped and light; a thread or two keep ahead of any step.
THREADS = 2
BATCHES_AHEAD = 8


def batch_at(store: Store, run: Run, step: int, rows: np.ndarray | None = None) -> Batch:
    """The training batch of one step; it depends on nothing but the store, the run's seed and the step.

    Arguments:
        store: the token store.
        run: the run; of it `seed`, `data.packing`, `train.batch_size` and `train.sequence_length` matter.
        step: from 0.
        rows: which rows of the global batch; None: all.

    Returns:
        The rows asked for, `[B, T]` each.

    Raises:
        UserError: the train split is too short for one example.
    """
    examples = _train_examples(store, run)
    return _rows_of(examples, Order(len(examples), run.seed), run, step, rows)


def train_batches(store: Store, run: Run, start_step: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """The batches of the steps from `start_step` to the run's last, in order, read ahead.

    Arguments:
        store: the token store.
        run: the run.
        start_step: the first step to come, from 0; starting in the middle costs nothing.
        rows: which rows of the global batch this process supplies; None: all.

    Returns:
        An iterator; the batch of step s equals `batch_at(store, run, s, rows)`.

    Raises:
        UserError: the train split is too short for one example (at the call, not at the first batch).
    """
    examples = _train_examples(store, run)
    order = Order(len(examples), run.seed)
    return _read_ahead(examples, order, run, start_step, rows)


def eval_batches(store: Store, run: Run, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """The batches that every evaluation of a run reads: the same ones each time, no example twice.

    Arguments:
        store: the token store.
        run: the run.
        rows: which rows of each batch this process supplies; None: all.

    Returns:
        `train.eval_batches` batches of `train.batch_size` rows, or fewer where the validation split has fewer examples;
        the last is then filled up with rows of weight 0.

    Raises:
        UserError: the validation split is too short for one example (at the call).
    """
    examples = open_examples(store.split("validation"), run.data.packing, run.train.sequence_length)
    return _fixed(examples, run, rows)


def _train_examples(store: Store, run: Run) -> Stream | Padded:
    return open_examples(store.split("train"), run.data.packing, run.train.sequence_length)


def _rows_of(examples: Stream | Padded, order: Order, run: Run, step: int, rows: np.ndarray | None) -> Batch:
    indices = order.indices(step, run.train.batch_size)
    return examples.batch(indices if rows is None else indices[rows])


def _read_ahead(
    examples: Stream | Padded, order: Order, run: Run, start_step: int, rows: np.ndarray | None
) -> Iterator[Batch]:
    import grain

    steps = grain.MapDataset.range(start_step, run.train.steps)
    batches = steps.map(lambda step: _rows_of(examples, order, run, int(step), rows))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()


def _fixed(examples: Stream | Padded, run: Run, rows: np.ndarray | None) -> Iterator[Batch]:
    size, length = run.train.batch_size, run.train.sequence_length
    order = Order(len(examples), seed=0)
    for step in range(min(run.train.eval_batches, -(-len(examples) // size))):
        # The order goes on into a second epoch; an evaluation ends with the first.
        indices = order.indices(step, size)[: len(examples) - step * size]
        mine = np.arange(size) if rows is None else rows
        batch = examples.batch(indices[mine[mine < len(indices)]])
        filler = np.zeros((len(mine) - len(batch.inputs_BT), length), np.int32)
        yield Batch(
            np.concatenate([batch.inputs_BT, filler]),
            np.concatenate([batch.targets_BT, filler]),
            np.concatenate([batch.weights_BT, filler.astype(np.float32)]),
        )
