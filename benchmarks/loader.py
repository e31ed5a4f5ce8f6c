"""How fast batches come, beside a plain copy of the same tokens; and whether a training step ever waits for one.

    python benchmarks/loader.py

1. `TrainData.batches`, as training reads it (Grain's threads read ahead), for `stream`, `packed` with the document mask
   and a mixture of two sources, batches of 32 rows. Beside it a loop of `np.copyto` that brings the same windows, in
   the same random order, from the memory-mapped shards into batches as they lie, with the windows known beforehand:
   that is bound by memory, and makes no order, no int32 ids, targets or weights. They take turns; medians. Places of a
   batch that hold padding don't count as tokens.
2. Two runs of `meshwright.train` on this machine's processor: `llama-tiny` on a stream, and on a packed mixture. The
   benchmark takes the time between asking for a batch and having it. `idle_share` is the share of these waits in the
   time of all steps but the first, which compiles; the aim is under 1%.

The stores hold random letters in documents of 1,000 tokens on average, some of them very long, as web pages are.
"""

import io
import itertools
import json
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import machine, write_results

import meshwright
from meshwright.config import Run, make_run
from meshwright.data.corpus import Corpus
from meshwright.data.examples import Batch, open_examples
from meshwright.data.loader import TrainData
from meshwright.data.order import Order
from meshwright.data.packing import ensure_packed
from meshwright.data.prepare import prepare
from meshwright.track.console import PlainConsole

STORE_TOKENS = 40_000_000
BATCH = 32
LENGTHS = (1024, 2048)
ROUNDS, SECONDS = 3, 0.5
TRAINING_STEPS = 100
ALONE, MIXED = {"a": 1.0}, {"a": 2.0, "b": 1.0}


def make_stores(folder: Path) -> None:
    """The stores `a` and `b`."""
    letters = np.frombuffer((string.ascii_lowercase + " ").encode(), np.uint8)
    for seed, name in enumerate(("a", "b")):
        random = np.random.default_rng(seed)
        lengths = random.lognormal(np.log(1000) - 0.5, 1.0, STORE_TOKENS // 1000).astype(int) + 1
        text = random.choice(letters, int(lengths.sum())).tobytes().decode()
        with (folder / f"{name}.jsonl").open("w") as lines:
            for start, end in itertools.pairwise([0, *np.cumsum(lengths).tolist()]):
                lines.write(json.dumps({"text": text[start:end]}) + "\n")
        data = {"train": str(folder / f"{name}.jsonl"), "store": str(folder / name), "validation": 0.01}
        prepare(make_run({"name": name, "data": data, "tokenizer": {"kind": "bytes"}, "model": {"preset": "gpt2"}}))


def a_run(folder: Path, packing: str, weights: dict[str, float], **train: int) -> Run:
    """A run on these stores, with nothing but training."""
    sources = [{"source": str(folder / name), "weight": weight} for name, weight in weights.items()]
    return make_run(
        {
            "name": packing,
            "run_dir": str(folder / f"run-{packing}"),
            "data": {"train": sources, "packing": packing},
            "tokenizer": {"kind": "bytes"},
            "model": {"preset": "llama-tiny", "context_length": max(LENGTHS)},
            "train": {"eval_every": 0, "sample_every": 0, **train},
            "checkpoint": {"every": 0},
        }
    )


def windows(corpus: Corpus, run: Run) -> list[list[tuple[np.ndarray, int]]]:
    """For the steps of about an epoch, what each copies: parts of the shards, and where in the batch each goes."""
    length = run.train.sequence_length
    shards = [_shard(store.path) for store in corpus.stores]
    many = [len(open_examples(store, "train", run)) for store in corpus.stores]
    order = Order(many, run.seed, [[0, run.train.batch_size]], corpus.weights)
    plans = [ensure_packed(store, "train", length) for store in corpus.stores] if run.data.packing == "packed" else None
    steps = []
    for step in range(STORE_TOKENS // (BATCH * length)):  # more than a processor's cache holds
        parts = []
        for row, (source, index) in enumerate(zip(*order.rows(step), strict=True)):
            place = row * (length + 1)
            if plans is None:
                parts.append((shards[source][index * length :][: length + 1], place))
                continue
            plan = plans[source]
            pieces = slice(int(plan.ends[index - 1]) if index else 0, int(plan.ends[index]))
            for start, targets in zip(plan.starts[pieces].tolist(), plan.targets[pieces].tolist(), strict=True):
                parts.append((shards[source][start : start + targets], place))
                place += targets
        steps.append(parts)
    return steps


def _shard(store: Path) -> np.ndarray:
    (path,) = store.glob("train_[0-9]*.bin")
    return np.memmap(path, np.uint16, "r").view(np.ndarray)


def copy_rate(steps: list[list[tuple[np.ndarray, int]]], length: int) -> float:
    """Tokens a second of copying, window by window."""
    batches = [np.empty(BATCH * (length + 1), np.uint16) for _ in range(8)]
    tokens, start = 0, time.perf_counter()
    for number in itertools.count():
        batch = batches[number % 8]
        for window, place in steps[number % len(steps)]:
            np.copyto(batch[place : place + len(window)], window)
            tokens += len(window)
        if (seconds := time.perf_counter() - start) > SECONDS:
            return tokens / seconds
    raise AssertionError


def loader_rate(data: TrainData) -> float:
    """Tokens a second of the loader, from its first batch on."""
    batches = data.batches(0)
    first = next(batches)
    tokens, start = 0.0, time.perf_counter()
    for batch in batches:
        tokens += first.inputs_BT.size * (1 - data.padding)
        assert batch.inputs_BT.shape == first.inputs_BT.shape
        if (seconds := time.perf_counter() - start) > SECONDS:
            batches.close()
            return tokens / seconds
    raise AssertionError


def compare(folder: Path, case: str, packing: str, weights: dict[str, float], length: int) -> dict[str, Any]:
    """The loader and the copy in turn."""
    run = a_run(folder, packing, weights, steps=10**6, batch_size=BATCH, sequence_length=length)
    corpus = prepare(run)
    data, steps = TrainData(corpus, run), windows(corpus, run)
    loaded, copied = [], []
    for _ in range(ROUNDS):
        loaded.append(loader_rate(data))
        copied.append(copy_rate(steps, length))
    speed, bound = statistics.median(loaded), statistics.median(copied)
    return {
        "case": case,
        "sequence_length": length,
        "tokens_per_second": speed,
        "copy_tokens_per_second": bound,
        "share_of_copy": speed / bound,
    }


def waits(folder: Path, packing: str, weights: dict[str, float]) -> dict[str, float]:
    """A training run, and what it waits for its batches."""
    taken: list[tuple[float, float]] = []  # when a batch was asked for, and when it was there

    class Timed(TrainData):
        def batches(self, *arguments: Any) -> Iterator[Batch]:
            iterator = super().batches(*arguments)
            asked = time.perf_counter()
            for batch in iterator:
                taken.append((asked, time.perf_counter()))
                yield batch
                asked = time.perf_counter()

    run = a_run(folder, packing, weights, steps=TRAINING_STEPS)
    with patch("meshwright.trainer.TrainData", Timed):
        meshwright.train(run, console=PlainConsole(io.StringIO()))
    assert len(taken) == TRAINING_STEPS
    waited = [there - asked for asked, there in taken[1:]]
    seconds = taken[-1][1] - taken[1][0]
    return {
        "steps": len(waited),
        "batch_tokens": run.train.batch_size * run.train.sequence_length,
        "step_ms": seconds / len(waited) * 1e3,
        "median_wait_ms": statistics.median(waited) * 1e3,
        "longest_wait_ms": max(waited) * 1e3,
        "idle_share": sum(waited) / seconds,
    }


def main() -> None:
    """Measure, write the results, print them."""
    measured_on = machine("numpy", "grain", "jax")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_stores(folder)
        cases = [("stream", "stream", ALONE), ("packed", "packed", ALONE), ("mixture", "stream", MIXED)]
        rates = [compare(folder, *case, length) for case in cases for length in LENGTHS]
        training = {"stream": waits(folder, "stream", ALONE), "packed mixture": waits(folder, "packed", MIXED)}
    for row in rates:
        print(
            f"{row['case']:<8} {row['sequence_length']:5} {row['tokens_per_second'] / 1e6:8.1f} M tokens/s   "
            f"copy {row['copy_tokens_per_second'] / 1e6:8.1f} M   {row['share_of_copy']:.1%}"
        )
    for case, run in training.items():
        print(
            f"training, {case}: a step {run['step_ms']:.1f} ms, waits for its batch {run['median_wait_ms']:.3f} ms "
            f"(at most {run['longest_wait_ms']:.2f}): idle {run['idle_share']:.2%}"
        )
    print(write_results("loader", measured_on, {"rounds": ROUNDS, "rates": rates, "training": training}))


if __name__ == "__main__":
    main()
