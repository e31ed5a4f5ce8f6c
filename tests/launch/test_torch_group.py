"""`TorchGroup` keeps the promises of `Group`, over any store of `torch.distributed`."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from meshwright.config import make_run
from meshwright.errors import UserError
from meshwright.launch import joining, torch_group
from meshwright.launch.addresses import interface_of
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


@pytest.mark.parametrize(
    ("omp", "on_ray", "expected"), [(None, False, 3), ("8", False, 8), (None, True, 3), ("1", True, 3)]
)
def test_processes_share_the_cores_that_they_may_use(monkeypatch, omp, on_ray, expected):
    monkeypatch.setattr(torch_group, "core_count", lambda: 7)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert torch_group.threads_of(2, on_ray=on_ray) == expected


def test_never_more_threads_than_pytorch_itself_would_take(monkeypatch):
    monkeypatch.setattr(torch_group, "core_count", lambda: 16)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [torch_group.threads_of(count, on_ray=False) for count in (1, 4, 32)] == [8, 4, 1]


CARDS = [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]


@pytest.mark.parametrize(("given", "expected"), [("", [{}, {}]), ("4,7,8", CARDS)])
def test_each_worker_sees_a_card_of_its_own(monkeypatch, given, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert torch_group.shares_of_cards(2) == expected


def test_too_few_cards(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match=r"launch\.workers = 2: each needs a card of its own, and 1 can be seen"):
        torch_group.shares_of_cards(2)


@pytest.mark.parametrize("reports", [[["a", ""]] * 2, [["a", "x"], ["a", "y"], ["b", "z"]]])
def test_all_have_cards_of_their_own_or_none(reports):
    torch_group.check_cards(reports)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([["a", "x"], ["b", ""]], r"launch: PyTorch sees no card in worker 1 \(b\), but does in the others"),
        ([["a", "x"], ["a", "y"], ["a", "x"]], r"launch: worker 0 \(a\) and worker 2 \(a\) have the same card; set"),
    ],
)
def test_cards_that_some_lack_or_share(reports, said):
    with pytest.raises(UserError, match=said):
        torch_group.check_cards(reports)


def test_the_first_goes_last(groups):
    order = []

    def go(group):
        if group.rank:
            threading.Event().wait(0.1 * group.rank)
            order.append(group.rank)
        group.close()
        if not group.rank:
            order.append(0)

    in_each(groups, go)
    assert order == [1, 2, 0]


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == ("lo" if sys.platform == "linux" else "")
    assert interface_of("192.0.2.123") == ""


def test_without_pytorch_it_is_said_what_to_install(monkeypatch):
    monkeypatch.delattr("meshwright.launch.torch_group")
    monkeypatch.delitem(sys.modules, "meshwright.launch.torch_group")
    monkeypatch.setitem(sys.modules, "torch", None)
    run = make_run({"engine": "torch", "data": {"train": "x"}, "model": {"preset": "gpt2-tiny"}})
    with pytest.raises(UserError, match=r'engine = "torch": needs torch, which isn\'t installed; pip install'):
        joining.join(run, "127.0.0.1:1", 0, 1)
