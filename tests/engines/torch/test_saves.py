"""Saving in the background, beside what the processes of a run do together meanwhile."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import torch.distributed.checkpoint as dcp
from families import theirs
from processes import run_processes
from torch_jobs import FAMILIES, VOCAB, Layout, batch, make_engine, make_run, parameters, rows_of

from meshwright.engines.base import Sampling


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    kind, keys = FAMILIES["llama"]
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs(kind, **keys).save_pretrained(folder)
    return folder


def save_beside(group, checkpoint: str, mesh: dict[str, int], folder: str) -> list[str]:
    """Save, and sample, evaluate and train meanwhile: the first process begins to send for the save when it has done
    all of that, and the second one begins that when it sends for the save."""
    run = make_run(checkpoint, Layout(mesh))
    engine, order, come = make_engine(run), [], threading.Event()
    prepare = dcp.FileSystemWriter.prepare_local_plan

    def prepared(*arguments):
        if group.is_primary:
            come.wait(60)
        order.append("save")
        come.set()
        return prepare(*arguments)

    dcp.FileSystemWriter.prepare_local_plan = prepared
    engine.train_step(rows_of(engine, batch(0)))
    state = parameters(engine)
    saved = engine.save(Path(folder))
    if not group.is_primary:
        come.wait(60)
        time.sleep(0.5)  # until it waits for the other
    assert len(list(engine.generate([[1, 2, 3]], 4, VOCAB, Sampling()))) == 4
    engine.eval_step(rows_of(engine, batch(1)))
    engine.train_step(rows_of(engine, batch(1)))
    order.append("all else")
    come.set()
    saved()
    again = make_engine(run)
    again.restore(Path(folder))
    for name, value in parameters(again).items():
        np.testing.assert_array_equal(value, state[name])
    assert any((value != state[name]).any() for name, value in parameters(engine).items())
    return order


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_save_and_what_goes_on_beside_it_do_not_wait_for_each_other(checkpoint, tmp_path, axis):
    arguments = (str(checkpoint), {axis: 2}, str(tmp_path))
    first, second = run_processes(save_beside, timeout=120, arguments=arguments, engine="torch")
    assert (first, second) == (["all else", "save"], ["save", "all else"])  # so that neither can be in step
