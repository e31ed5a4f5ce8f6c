"""Dropout of the PyTorch engine: which masks differ, and that a run which goes on draws those of the unbroken one."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

from families import theirs
from processes import run_processes
from torch_jobs import BATCH, FAMILIES, Layout, batch, make_engine, make_run, rows_of

RATE, BEFORE, AFTER = 0.2, 2, 2
MESHES = ["data", "fsdp"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    kind, keys = FAMILIES["gpt2"]
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs(kind, **keys).save_pretrained(folder)
    return str(folder)


def engine_of(checkpoint: str, mesh: dict[str, int], rate: float, accumulate: int = 1, seed: int = 0):
    run = make_run(checkpoint, Layout(mesh, accumulate), model={"dropout": rate})
    return make_engine(run.model_copy(update={"seed": seed}))


def alike():
    """A batch that is one row again and again."""
    return type(batch(0))(*(None if part is None else np.repeat(part[:1], BATCH, axis=0) for part in batch(0)))


def own_sums(engine, whole) -> list[float]:
    """The loss sum of each micro-batch of an update, of the rows that this process has."""
    found, one_pass = [], engine._step._pass

    def kept(rows, count):
        total = one_pass(rows, count)
        found.append(float(total))
        return total

    engine._step._pass = kept
    try:
        engine.train_step(rows_of(engine, whole))
    finally:
        engine._step._pass = one_pass
    return found


@pytest.mark.parametrize("rate", [RATE, 0.0])
def test_each_micro_batch_update_and_seed_has_masks_of_its_own(checkpoint, rate):
    def sums(seed: int = 0, count: int = 0) -> list[float]:
        engine = engine_of(checkpoint, {}, rate, accumulate=2, seed=seed)
        engine._optimizer.set_count(count)
        return own_sums(engine, alike())

    first = sums()
    found = [*first, *sums(seed=1), *sums(count=1)]
    assert sums() == first
    assert len(set(found)) == (len(found) if rate else 1)


def facts_of(_group, checkpoint: str, folder: str) -> dict:
    """The sums of what each of two processes has: of rows that are alike, and of some updates, and of those that a
    restored engine makes again."""
    found: dict = {}
    for axis in MESHES:
        for rate in (RATE, 0.0):
            found[f"{axis}, {rate}"] = own_sums(engine_of(checkpoint, {axis: 2}, rate), alike())
        engine, place = engine_of(checkpoint, {axis: 2}, RATE), Path(folder, axis)
        place.mkdir(exist_ok=True)
        found[f"{axis}, before"] = [own_sums(engine, batch(step)) for step in range(BEFORE)]
        engine.save(place)()
        found[f"{axis}, after"] = [own_sums(engine, batch(BEFORE + step)) for step in range(AFTER)]
        for case, count in (("restored", BEFORE), ("miscounted", 0)):
            again = engine_of(checkpoint, {axis: 2}, RATE)
            again.restore(place)
            again._optimizer.set_count(count)
            found[f"{axis}, {case}"] = [own_sums(again, batch(BEFORE + step)) for step in range(AFTER)]
    return found


@pytest.fixture(scope="module")
def facts(checkpoint, tmp_path_factory):
    return run_processes(facts_of, arguments=(checkpoint, str(tmp_path_factory.mktemp("saved"))), engine="torch")


@pytest.mark.parametrize("axis", MESHES)
def test_processes_with_rows_of_their_own_have_masks_of_their_own(facts, axis):
    with_dropout, without = ([one[f"{axis}, {rate}"] for one in facts] for rate in (RATE, 0.0))
    assert with_dropout[0] != with_dropout[1]
    assert without[0] == without[1] != with_dropout[0]


@pytest.mark.parametrize("axis", MESHES)
def test_an_update_after_a_restore_has_the_masks_of_the_unbroken_run(facts, axis):
    for one in facts:
        assert one[f"{axis}, restored"] == one[f"{axis}, after"]
        # Of the first, the count of updates is in nothing but the masks.
        assert one[f"{axis}, miscounted"][0] != one[f"{axis}, after"][0]
        sums = [*one[f"{axis}, before"], *one[f"{axis}, after"]]
        assert len({tuple(row) for row in sums}) == BEFORE + AFTER
