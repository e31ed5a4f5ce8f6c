"""What passes between driver and workers, without a cluster."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.launch import ray_desk
from meshwright.launch.ray_desk import CLOSED, Desk, DeskConsole, Failure
from meshwright.signals import Stop
from meshwright.track.console import Summary


def test_the_first_failure_counts_and_closes():
    desk = Desk()
    assert desk.is_open() and desk.failure() is None and desk.beat(0, []) == 0
    desk.ask_to_stop(15)
    assert desk.beat(0, []) == 15
    first, second = (Failure(rank, "10.0.0.1", "text", mistake=False) for rank in (1, 0))
    desk.fail(first)
    desk.fail(second)
    assert desk.news().failure == desk.failure() == first
    assert not desk.is_open() and desk.beat(1, []) == CLOSED
    assert desk.beats() == {0: 2, 1: 1}


def test_news_come_once_and_in_order():
    desk = Desk()
    desk.say([("note", ("a",))])
    desk.say([("note", ("b",)), ("progress", (3,))])
    news = desk.news()
    assert news.calls == [("note", ("a",)), ("note", ("b",)), ("progress", (3,))] and news.failure is None
    assert desk.news().calls == []
    assert 0 <= news.silence < 5


def test_workers_that_lose_their_places_are_waited_for_anew(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ray_desk, "time", SimpleNamespace(monotonic=lambda: now[0]))
    desk = Desk()
    assert not desk.news().placed
    now[0] += 5
    assert desk.news().silence == 5
    desk.workers_are(placed=True)
    now[0] += 7
    assert desk.news().placed and desk.news().silence == 7
    desk.workers_are(placed=False)
    assert not desk.news().placed and desk.news().silence == 0


def test_a_console_of_a_worker_has_the_drivers_called(monkeypatch):
    desk, moving, measured = Desk(), [], []
    gauges = {key: SimpleNamespace(set=partial(lambda *call: measured.append(call), key)) for key in ("step", "loss")}
    monkeypatch.setattr(ray_desk, "measure", gauges.get)
    actor = SimpleNamespace(beat=SimpleNamespace(remote=desk.beat))
    console = DeskConsole(actor, lambda: bool(moving))
    console.start("a run", {"engine": "jax"}, 20, 4)
    assert not console.stepped
    for step in range(5, 15):
        console.progress(step)
    assert console.stepped
    console.step({"step": 13, "loss": 2.5})
    console.step({"step": 14, "loss": 1.5})
    assert desk.news().calls == [] and measured == []
    desk.ask_to_stop(15)
    assert console.beat(0) == 15 and desk.beats() == {0: 1}
    assert sorted(measured) == [("loss", 1.5, {"run": "a run"}), ("step", 14, {"run": "a run"})]
    summary = Summary(Path("runs/a"), 14, 1.0)
    console.finish(summary)
    moving.append(True)
    console.finish(summary)
    console.beat(0)
    console.beat(0)
    assert desk.news().calls == [
        ("start", ("a run", {"engine": "jax"}, 20, 4)),
        ("progress", (14,)),
        ("step", ({"step": 13, "loss": 2.5},)),
        ("step", ({"step": 14, "loss": 1.5},)),
        ("finish", (summary,)),
    ]


def test_one_that_prepares_does_not_hang(monkeypatch):
    console, now = DeskConsole(None, lambda: False), [100.0]
    monkeypatch.setattr(ray_desk, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console.note("a word")
    now[0] = 200.0
    console.prepare_progress("reading", 1, None, 0, 0)
    assert console.moved == 200.0 and [method for method, _ in console._take()] == ["note"]


def test_a_desk_that_is_out_of_reach_for_a_while_is_waited_for(monkeypatch):
    exceptions = pytest.importorskip("ray").exceptions
    answers: list = [exceptions.ActorUnavailableError("no answer", None), exceptions.GetTimeoutError(), 15]

    def get(reference, timeout):
        answer = answers.pop(0) if answers else exceptions.ActorDiedError()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(ray_desk, "BEAT_SECONDS", 0.0)
    stop = Stop()
    with pytest.raises(SystemExit):
        ray_desk._beat(SimpleNamespace(beat=lambda rank: None), 0, stop, lambda: None)
    assert stop.signal == 15 and not answers


def test_a_message_is_small_and_a_close_says_all(monkeypatch):
    class Ray:
        exceptions = SimpleNamespace(RayError=RuntimeError)
        get = staticmethod(lambda reference, timeout: reference)

    monkeypatch.setitem(sys.modules, "ray", Ray)
    desk, sizes = Desk(), []

    def say(calls):
        sizes.append(len(calls))
        desk.say(calls)

    actor = SimpleNamespace(beat=SimpleNamespace(remote=desk.beat), say=SimpleNamespace(remote=say))
    console = DeskConsole(actor, lambda: False)
    for number in range(700):
        console.note(str(number))
    console.beat(0)
    assert len(desk.news().calls) == 200
    console.close()
    assert sizes == [200, 200, 100] and desk.news().calls == [("note", (str(number),)) for number in range(200, 700)]
