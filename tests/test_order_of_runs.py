"""The order of the data of a run: a hash of each step's tokens, however many processes there are and wherever it
starts."""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from helpers import run_values, write_corpus
from processes import run_processes

import meshwright as mw
from meshwright.config import Run
from meshwright.data.loader import TrainData
from meshwright.data.prepare import prepare

STEPS, ROWS = 50, 8


def values(folder: Path, packing: str, **sections) -> dict:
    """Three sources, the third from step 20 on."""
    sources = [
        {"source": f"{folder}/one", "weight": 0.6},
        {"source": f"{folder}/two", "weight": 0.4, "later": [{"step": 30, "weight": 0.1}]},
        {"source": f"{folder}/three", "weight": 0.0, "later": [{"step": 20, "weight": 0.5}]},
    ]
    data = {"train": sources, "packing": packing, "store": f"{folder}/stores"}
    train = {"steps": STEPS, "batch_size": ROWS, **sections.pop("train", {})}
    return run_values("", data=data, train=train, model={"vocab_size": 257}, **sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("order")
    for seed, name in enumerate(("one", "two", "three")):
        write_corpus(made / name, documents=30, seed=seed)
    return made


def rows_of(run: Run, processes: int) -> list[np.ndarray]:
    """The rows of each process, where the batch is shared out among them: of each micro-batch its part."""
    micro = run.micro_batch_size
    firsts = np.arange(0, run.train.batch_size, micro)[:, None]
    parts = np.split(np.arange(micro), processes)
    return [(firsts + part).ravel() for part in parts]


def digests(data: TrainData, start: int, rows: np.ndarray) -> list[list[str]]:
    """A hash of each row of each step."""
    return [
        [
            hashlib.sha256(b"".join(part[row].tobytes() for part in batch if part is not None)).hexdigest()
            for row in range(len(rows))
        ]
        for batch in data.batches(start, rows)
    ]


def by_step(of_processes: list[tuple[np.ndarray, list[list[str]]]]) -> list[str]:
    """A hash of each step, from the rows of all processes."""
    steps = []
    for step in zip(*(rows for _, rows in of_processes), strict=True):
        numbers = np.concatenate([numbers for numbers, _ in of_processes])
        assert sorted(numbers) == list(range(ROWS))
        in_order = [row for _, row in sorted(zip(numbers, [row for part in step for row in part], strict=True))]
        steps.append(hashlib.sha256("".join(in_order).encode()).hexdigest()[:16])
    return steps


def hashes(run: Run, processes: int = 1, start: int = 0) -> list[str]:
    """A hash of each step, read as so many processes would."""
    corpus = prepare(run)
    return by_step([(rows, digests(TrainData(corpus, run), start, rows)) for rows in rows_of(run, processes)])


def read_as_one_of_several(group, run_values: dict) -> list:
    """The rows that this process's devices need, and their hashes."""
    from meshwright.engines.jax.mesh import make_run_mesh

    run = mw.make_run(run_values)
    rows = make_run_mesh(run, run.model.spec).rows(run.train.batch_size)
    return [rows.tolist(), digests(TrainData(prepare(run), run), 0, rows)]


@pytest.mark.parametrize("packing", ["stream", "packed"])
def test_each_step_reads_the_same_tokens_whoever_reads_them(folder, packing):
    run = mw.make_run(values(folder, packing))
    whole = hashes(run)
    for step, hashed in enumerate(whole):
        print(f"step {step:2}  {hashed}")
    assert len(set(whole)) == STEPS
    assert hashes(run, processes=2) == hashes(run, processes=4) == whole
    start = random.Random(packing).randrange(1, STEPS)
    assert hashes(run, start=start) == whole[start:] and hashes(run, processes=2, start=start) == whole[start:]
    smaller = mw.make_run(values(folder, packing, train={"micro_batch_size": 4}))
    assert hashes(smaller, processes=2) == hashes(smaller, processes=4) == whole
    other_seed = hashes(mw.make_run(values(folder, packing, seed=1)))
    assert not set(other_seed) & set(whole)


@pytest.mark.parametrize(("workers", "first"), [(2, [0, 1, 4, 5]), (4, [0, 4])])
def test_real_processes_read_what_one_does(folder, workers, first):
    run = values(folder, "packed", train={"micro_batch_size": 4})
    one = hashes(mw.make_run(run))
    found = run_processes(read_as_one_of_several, workers=workers, timeout=150, arguments=(run,))
    assert found[0][0] == first and len(found) == workers
    assert by_step([(np.array(rows), hashed) for rows, hashed in found]) == one
