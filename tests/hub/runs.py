"""Runs that start from a checkpoint, small enough to train in a second."""

from pathlib import Path

from glass import ENGLISH

import meshwright as mw
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.start import start_state


def still_run(folder: Path, name: str, init: str, **sections) -> mw.Run:
    """A run of two steps whose learning rate is so small that no parameter changes."""
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir(parents=True)
        for number in range(24):
            (texts / f"{number:02}.txt").write_text(f"{number}\n{ENGLISH}", encoding="utf-8")
    values = {
        "name": name,
        "run_dir": str(folder / name),
        "data": {"train": str(texts), "validation": 0.3, "store": str(folder / "stores" / name)},
        "model": {"init": init},
        "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0},
        "train": {"steps": 2, "batch_size": 2, "sequence_length": 64, "eval_every": 2, "sample_every": 0},
    }
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section}
    return mw.make_run(values)


def started(run: mw.Run) -> JaxEngine:
    """An engine with the parameters that a run starts from; it doesn't train, so no train step is compiled."""
    engine = JaxEngine(run, run.model.spec, training=False)
    if not run.lora.rank:  # with adapters it has them already
        engine._state = start_state(engine._program)
    return engine


def all_parameters(run_dir: Path) -> dict:
    """Every parameter of a trained run as an evaluation uses it, by its dotted path."""
    on_host = mw.open_run(run_dir).engine.on_host()
    return {path: on_host.read(path, ()) for path in on_host.shapes}
