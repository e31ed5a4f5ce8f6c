"""Processes that wait while one of them downloads or prepares, for longer than they wait elsewhere."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from test_checkpoints import Restoring, save_all

from meshwright import trainer
from meshwright.checkpoints import Checkpoints
from meshwright.launch.group import GroupError
from meshwright.launch.torch_group import TorchGroup
from meshwright.resuming import resume

IMPATIENT = 1.0
SLOW = 2 * IMPATIENT


class Impatient(TorchGroup):
    """Where no other time is given, it waits for others as briefly as a test can."""

    def barrier(self, name, timeout=IMPATIENT):
        super().barrier(name, timeout)

    def broadcast(self, value, name="value", timeout=IMPATIENT):
        return super().broadcast(value, name, timeout)

    def gather(self, value, name="value", timeout=IMPATIENT):
        return super().gather(value, name, timeout)


class Downloading:
    def fetch(self, folder, manifest):
        time.sleep(SLOW)


class ReadingTogether(Restoring):
    def __init__(self, group):
        self._group = group

    def restore(self, folder):
        self._group.barrier("read together")


def in_each(do):
    store = dist.HashStore()
    groups = [Impatient(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(do, groups))


def late(group):
    if group.rank:
        time.sleep(SLOW)
    group.barrier("late")


def test_elsewhere_they_give_up():
    with pytest.raises(GroupError, match=r"barrier 'late': worker 0 \(of 2, from 0\) gave up"):
        in_each(late)


def test_a_checkpoint_that_each_downloads_in_turn(tmp_path):
    save_all(Checkpoints(tmp_path, 1), (4, None))

    def go_on(group):
        checkpoints = Checkpoints(tmp_path, 1, commits=group.is_primary, reader=Downloading())
        return resume(ReadingTogether(group), checkpoints, lambda step: {}, print, group).step

    assert in_each(go_on) == [4, 4]


def test_one_that_reads_a_checkpoint_slowly(tmp_path):
    save_all(Checkpoints(tmp_path, 1), (4, None))

    def go_on(group):
        slowly = SimpleNamespace(restore=lambda folder: time.sleep(SLOW * group.rank))
        return resume(slowly, Checkpoints(tmp_path, 1, commits=group.is_primary), lambda step: {}, print, group).step

    assert in_each(go_on) == [4, 4]


def test_a_store_that_each_prepares_in_turn(monkeypatch):

    def slowly(run, source, on_progress, on_note):
        time.sleep(SLOW)
        return run

    monkeypatch.setattr(trainer, "prepare", slowly)
    console = SimpleNamespace(prepare_progress=None, note=None)

    def prepare_and_meet(group):
        made = trainer.prepare_once(group.rank, None, console, group)
        group.barrier("train")
        return made

    assert in_each(prepare_and_meet) == [0, 1]
