"""The state of the JAX engine on its way to disk."""

import gc
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import run_processes

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.base import RESTORED
from meshwright.engines.jax import checkpoint
from meshwright.engines.jax.engine import JaxEngine
from meshwright.errors import UserError

MODEL = {"preset": "llama-tiny", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 64}


def make_engine(init: str = "random", **sections) -> JaxEngine:
    model = {**MODEL, "vocab_size": 64, "context_length": 16}
    train = {"batch_size": 8, "sequence_length": 16, "steps": 10}
    run = make_run({"data": {"train": "none"}, "model": model, "train": train, **sections})
    spec, run = run.model.spec, run.model_copy(update={"model": run.model.model_copy(update={"init": init})})
    return JaxEngine(run, spec)


def train(engine: JaxEngine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = np.random.default_rng(step).integers(0, 64, (8, 17), dtype=np.int32)
        batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((8, 16), np.float32))
        losses.append(float(engine.train_step(batch)["loss"]))
    return losses


@pytest.mark.parametrize("has_room", [False, True])
def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch, has_room):
    # CPUs don't say what memory they have, so that there is never room for a copy.
    monkeypatch.setattr("meshwright.engines.jax.engine.fits_twice", lambda *_: has_room)
    engine = make_engine()
    train(engine, range(3))
    finish = engine.save(tmp_path)
    after = train(engine, range(3, 6))  # donates what is being written
    finish()

    again = make_engine()
    again.restore(tmp_path)
    assert train(again, range(3, 6)) == after
    fresh = train(make_engine(), range(3, 6))
    assert fresh != after


@pytest.mark.parametrize("has_room", [False, True])
def test_what_goes_wrong_is_told_at_the_end(tmp_path: Path, monkeypatch, has_room):
    monkeypatch.setattr("meshwright.engines.jax.engine.fits_twice", lambda *_: has_room)
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(Exception, match="state"):
        make_engine().save(tmp_path)()


def test_without_room_after_all_training_waits(tmp_path: Path, monkeypatch):
    def full(arrays):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("meshwright.engines.jax.engine.fits_twice", lambda *_: True)
    monkeypatch.setattr(checkpoint, "_copies", full)
    engine = make_engine()
    engine.save(tmp_path)()
    again = make_engine()
    again.restore(tmp_path)
    assert train(again, range(2)) == train(engine, range(2))


def test_room_for_a_copy_is_what_was_never_used(monkeypatch):
    engine = make_engine()
    state, plan = engine._state, engine._program.state
    assert not checkpoint.fits_twice(state, plan)  # a CPU doesn't say
    array = next(iter(checkpoint._flatten(checkpoint._trained(state, plan)).values()))
    monkeypatch.setattr(checkpoint, "_flatten", lambda state: {"a": array})

    class Card:
        def __init__(self, limit: int):
            self._limit = limit

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": self._limit, "peak_bytes_in_use": 10_000}

    class Shard:
        data = np.zeros(1000, np.float32)

    for limit, fits in ((14_000, False), (20_000, True)):
        Shard.device = Card(limit)
        monkeypatch.setattr(type(array), "addressable_shards", [Shard], raising=False)
        assert checkpoint.fits_twice(state, plan) is fits


def bytes_of_arrays() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("init", ["random", RESTORED])
def test_no_device_ever_holds_the_state_twice(tmp_path: Path, monkeypatch, init):
    before, trained = bytes_of_arrays(), make_engine()
    size = bytes_of_arrays() - before
    losses = train(trained, range(3))
    trained.save(tmp_path)()
    del trained

    def looking(*arguments):
        there.append(bytes_of_arrays())
        return checkpoint.restore_state(*arguments)

    monkeypatch.setattr("meshwright.engines.jax.engine.restore_state", looking)
    there, before = [], bytes_of_arrays()
    again = make_engine(init=init)
    made = bytes_of_arrays() - before
    assert made >= 0.9 * size if init == "random" else made < 0.1 * size
    again.restore(tmp_path)
    assert there[0] - before < 0.1 * size  # while it is read
    assert bytes_of_arrays() - before >= 0.9 * size
    assert train(again, range(3)) != losses  # three steps further


def test_no_room_is_no_damage(tmp_path: Path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    engine = make_engine()
    engine.save(tmp_path)()
    losses = train(engine, range(2))
    monkeypatch.setattr("meshwright.engines.jax.engine.restore_state", full)
    with pytest.raises(UserError, match=r"isn't damaged, but finds no room .* raise mesh.fsdp = 1"):
        engine.restore(tmp_path)
    monkeypatch.undo()
    engine.restore(tmp_path)
    assert train(engine, range(2)) == losses


def save_apart(group, folder: str) -> list[str]:
    """Save into a folder of this process's own; the second process makes that folder late."""
    engine, makedirs = make_engine(mesh={"fsdp": 2}), os.makedirs

    def late(path, *arguments, **more):
        if not group.is_primary and str(path).endswith("-tmp"):
            time.sleep(2)
        makedirs(path, *arguments, **more)

    mine = Path(folder) / str(jax.process_index())
    mine.mkdir()
    os.makedirs = late
    checkpoint.save_state(mine, engine._state, engine._program.state, apart=True)()
    return [path.name for path in mine.iterdir()]


def test_no_process_writes_before_a_folder_of_its_own_is_there(tmp_path: Path):
    assert run_processes(save_apart, timeout=100, arguments=(str(tmp_path),)) == [["state"], ["state"]]
    assert any((tmp_path / "1/state").rglob("*"))
