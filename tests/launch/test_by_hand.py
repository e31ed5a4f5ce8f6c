"""Workers that are started by hand: they find each other, train as one, and none hangs without the others."""

import fcntl
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from by_hand_runs import ends, free_port, losses, starting
from helpers import meshwright, run_values, wait_for

import meshwright as mw
from meshwright.errors import UserError
from meshwright.launch import roll_call as roll_call_module
from meshwright.launch.addresses import own_address
from meshwright.launch.by_hand import place_by_hand
from meshwright.launch.roll_call import roll_call


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path, port):
    """Start a worker; at the end of the test none may be left."""
    with starting(tmp_path, f"127.0.0.1:{port}", mesh={"data": 2}) as start:
        yield start


def test_two_stop_together_at_the_signal_of_one_and_go_on_as_one_process_would(start, tmp_path):
    slow = ["train.steps=400", "schedule.kind=constant", "checkpoint.every=1000"]
    workers = [start(0, *slow), start(1, *slow)]
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, workers[0])
    workers[1].send_signal(signal.SIGTERM)
    (code, out, _), (code_1, out_1, err_1) = ends(workers)
    assert (code, code_1) == (143, 143)
    stopped = int(re.findall(r"stopped after step (\d+) and saved", out)[0])
    assert out_1 == ""
    assert err_1 == "worker 1 of 2: its log is runs/tiny/workers/worker_1.log\n"
    more = [f"train.steps={stopped + 3}", *slow[1:]]
    ended = ends([start(1, *more), start(0, *more)])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert f"resuming at step {stopped}" in ended[1][1]
    alone = [
        "run_dir=alone",
        "launch.kind=local",
        "launch.workers=0",
        "launch.coordinator=",
        "launch.devices_per_worker=2",
    ]
    done = meshwright("train", "run.toml", *more, *alone, cwd=tmp_path, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    theirs, ours = losses(tmp_path / "runs/tiny"), losses(tmp_path / "alone")
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert len(theirs) == stopped + 3


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_ends_the_other_soon_and_is_named(start, tmp_path, killed):
    workers = [start(index, body="time.sleep(100)") for index in (0, 1)]
    wait_for(lambda: len(list(tmp_path.glob("here_?"))) == 2, workers[0])
    began = time.monotonic()
    workers[killed].kill()
    code, _, err = ends(workers)[1 - killed]
    assert code == 1
    assert time.monotonic() - began < 20
    assert f"error: worker {killed} ({socket.gethostname()}) is gone or has failed" in err
    log = (tmp_path / "runs/tiny/workers/worker_1.log").read_text()
    assert "words of worker 1\n" in log
    assert ("error: worker 0" in log) is (killed == 0)


def test_an_error_of_one_ends_both_and_shows_where_it_was_made(start, tmp_path):
    body = "if group.rank == 1: raise ValueError('as it should')\n    time.sleep(100)"
    (code, _, err), (code_1, _, err_1) = ends([start(index, body=body) for index in (0, 1)])
    assert (code, code_1) == (1, 1)
    assert f"error: worker 1 ({socket.gethostname()}) is gone or has failed" in err
    assert err_1.endswith("error: worker 1 failed: ValueError\nThe log of this one is runs/tiny/workers/worker_1.log\n")
    assert "ValueError: as it should" in (tmp_path / "runs/tiny/workers/worker_1.log").read_text()


def test_another_run_file_is_refused_in_both_before_anything_is_made(start, tmp_path):
    ended = ends([start(0), start(1, "train.steps=13")])
    host = socket.gethostname()
    expected = (
        f"error: train.steps = 13 in worker 1 ({host}), 12 in worker 0 ({host}): must be the same in all; start each "
        "with the same run file\n"
    )
    assert ended == [(1, "", expected)] * 2
    assert not (tmp_path / "runs").exists()


def test_a_coordinator_that_nobody_answers_at(start):
    began = time.monotonic()
    ((code, _, err),) = ends([start(1, "launch.start_timeout=1.5")])
    assert time.monotonic() - began < 20
    assert code == 1
    assert re.fullmatch(
        r"error: launch\.coordinator = '127\.0\.0\.1:\d+': worker 1 gave up after 1\.5 s \(launch\.start_timeout\): "
        r"Connection refused; start worker 0 \(launch\.index = 0\) there, and see that the port is open\n",
        err,
    )


def call(port: int, *workers: tuple, timeout: float = 20) -> list:
    """What each worker hears: (rank, size, facts), all at the same time."""

    def one(rank: int, size: int, facts: dict) -> object:
        try:
            return roll_call(f"127.0.0.1:{port}", rank, size, facts, timeout)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(one, *zip(*workers, strict=True)))


def test_those_who_did_not_come_are_named_in_all_that_did(port):
    heard = call(port, (0, 4, {}), (2, 4, {}), timeout=1)
    assert heard[0] == heard[1]
    assert heard[0].startswith(f"launch.workers = 4: workers 1, 3 didn't come to 127.0.0.1:{port} within 1 s")


def test_two_of_the_same_index(port):
    heard = call(port, (0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert all(text.startswith("launch.index = 1: is that of two workers, on ") for text in heard)


def test_another_number_of_workers(port):
    heard = call(port, (0, 2, {}), (1, 3, {}))
    assert heard[0] == heard[1]
    assert heard[0].startswith("launch.workers = 3 in worker 1 (")


def test_a_key_that_only_one_has(port):
    heard = call(port, (0, 3, {"a": 1}), (1, 3, {"a": 1}), (2, 3, {"a": 1, "b": [2]}))
    assert heard[0] == heard[1] == heard[2]
    assert heard[0].startswith("b = [2] in worker 2 (")


def test_a_worker_that_was_stopped_and_started_again_and_a_stranger(port):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(roll_call, f"127.0.0.1:{port}", 0, 3, {}, 20)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "size": 3, "host": "h", "facts": {}}\n'):
            with retried(port) as connection:
                connection.sendall(words)
                time.sleep(0.2)
        others = [pool.submit(roll_call, f"127.0.0.1:{port}", rank, 3, {}, 20) for rank in (1, 2)]
        for peers in (first, *others):
            peers.result().close()


def test_taking_leave_is_no_loss_and_going_without_is(port):
    lost = []
    first, second, third = call(port, (0, 3, {}), (1, 3, {}), (2, 3, {}))
    first.watch(lost.append)
    second.close()
    time.sleep(0.3)
    assert not lost and not first.lost.is_set()
    third._connections[0].shutdown(socket.SHUT_RDWR)
    assert first.lost.wait(5)
    assert lost == [first.gone] == [f"worker 2 ({socket.gethostname()})"]
    first.close()


def test_the_port_is_free_for_jax_as_soon_as_all_are_there(port):
    peers = call(port, (0, 2, {}), (1, 2, {}))
    socket.create_server(("127.0.0.1", port)).close()
    for one in peers:
        one.close()


def test_a_port_that_is_taken(port):
    with socket.create_server(("127.0.0.1", port)):
        (heard,) = call(port, (0, 2, {}))
    assert "worker 0 can't wait for the others" in heard and "Address already in use; choose another port" in heard


def retried(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def make(**launch):
    return mw.make_run(run_values("texts", launch={"kind": "processes", **launch}))


def test_which_runs_are_started_by_hand():
    assert place_by_hand(mw.make_run(run_values("texts")), {}) is None
    assert place_by_hand(make(workers=2), {}) is None
    place = place_by_hand(make(coordinator="a:1", index=1, workers=2), {})
    assert place is not None
    launch = place.run.launch
    assert (launch.coordinator, launch.index, launch.workers, place.variables) == ("a:1", 1, 2, {})


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({"index": 1, "workers": 2}, r"launch\.index = 1: needs launch\.coordinator, the host:port of worker 0"),
        ({"coordinator": "a:1", "workers": 2}, r"launch\.coordinator = 'a:1': needs launch\.index, too"),
        ({"coordinator": "a:1", "index": 0}, r"launch\.coordinator = 'a:1': needs launch\.workers, too"),
        ({"coordinator": "a:1", "index": 2, "workers": 2}, r"launch\.index = 2: must be less than launch\.workers = 2"),
    ],
)
def test_keys_that_are_missing_or_wrong(launch, expected):
    with pytest.raises(UserError, match=expected):
        place_by_hand(make(**launch), {})


def test_a_wait_for_others_among_many_open_files():
    """`select` can't take a file whose number is 1,024 or more."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1500)) as high:
        assert not roll_call_module._has_hung_up(high)
        theirs.close()
        assert roll_call_module._has_hung_up(high)


def test_the_address_by_which_others_are_reached():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid") == ""
