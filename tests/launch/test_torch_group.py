"""`TorchGroup` keeps the promises of `Group`, over any store of `torch.distributed`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.launch import torch_group
from meshwright.launch.group import GroupError
from meshwright.launch.torch_group import TorchGroup


@pytest.fixture
def groups():
    store = dist.HashStore()
    return [TorchGroup(store, rank, 3) for rank in range(3)]


def in_each(groups, do):
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(do, groups))


def test_all_learn_what_the_first_has_and_what_each_has(groups):
    def talk(group):
        told = [group.broadcast({"n": n, "of": group.rank}, "a") for n in range(600)]  # keys are deleted on the way
        return told, group.gather([group.rank, None]), group.gather(group.rank, "other")

    for told, all_lists, all_ranks in in_each(groups, talk):
        assert told == [{"n": n, "of": 0} for n in range(600)]
        assert (all_lists, all_ranks) == ([[0, None], [1, None], [2, None]], [0, 1, 2])


def test_nobody_passes_a_barrier_before_the_last_has_come(groups):
    come, order = threading.Event(), []

    def pass_it(group):
        if group.rank == 2:
            come.wait(10)
            order.append("last came")
        else:
            threading.Timer(0.2, come.set).start()
        group.barrier("here")
        order.append(group.rank)

    in_each(groups, pass_it)
    assert order[0] == "last came" and sorted(order[1:]) == [0, 1, 2]


def test_who_waits_in_vain_says_for_what_and_how_long(groups):
    with pytest.raises(GroupError, match=r"barrier 'b': worker 1 \(of 3, from 0\) gave up: not all .* within 0\.05 s"):
        groups[1].barrier("b", 0.05)
    with pytest.raises(GroupError, match=r"broadcast 'x': worker 1 .* worker 0 sent nothing within 0\.05 s"):
        groups[1].broadcast(1, "x", 0.05)
    with pytest.raises(GroupError, match=r"gather 'y': worker 0 .* a worker sent nothing"):
        groups[0].gather(1, "y", 0.05)


def test_others_can_talk_while_one_waits(groups):
    def wait_and_talk(group):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.broadcast, "late", "slow") if group.rank else None
            told = group.broadcast("at once", "fast")
            if group.rank == 0:
                group.broadcast("late", "slow")
            return told, waiting.result() if waiting else "late"

    assert in_each(groups, wait_and_talk) == [("at once", "late")] * 3


CARDS = [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]


@pytest.mark.parametrize(("given", "expected"), [("", [{}, {}]), ("4,7,8", CARDS)])
def test_each_worker_sees_a_card_of_its_own(monkeypatch, given, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert torch_group.shares_of_cards(2) == expected


def test_too_few_cards(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match=r"launch\.workers = 2: each needs a card of its own, and 1 can be seen"):
        torch_group.shares_of_cards(2)
