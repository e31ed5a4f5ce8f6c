"""What training asks of its data, where it isn't read from prepared stores."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.data.encode import Progress
from meshwright.data.examples import Batch
from meshwright.data.order import BatchSizes


class Batches(Protocol):
    """The training examples of a run; `meshwright.data.loader.TrainData` is one."""

    @property
    def padding(self) -> float:
        """The share of places that hold no token."""

    def batches(self, start_step: int, rows: np.ndarray | slice | None = None) -> Iterator[Batch]:
        """The batches of the steps from `start_step` to the run's last.

        Arguments:
            start_step: the first step to come, from 0.
            rows: which rows of the global batch this process supplies; None: all.
        """

    def taken(self, step: int) -> Mapping[str, float]:
        """What a training record says of what was read in the steps before one."""


class Feed(Protocol):
    """Makes the examples of a run as training goes on."""

    def corpus(self, progress: Progress, note: Callable[[str], None]) -> Corpus:
        """The tokenizer, what is held out, and what tells the data from other data.

        Arguments:
            progress: called as `Progress` says.
            note: called with a line to show.
        """

    def examples(self, batch_sizes: BatchSizes, note: Callable[[str], None]) -> Batches:
        """The examples; `corpus` was called before.

        Arguments:
            batch_sizes: of the steps so far, the last also of those to come.
            note: called with a line to show, from the thread that iterates the batches.
        """
