"""The launcher, with workers that do next to nothing: none is left behind, and the one that failed is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import kill, run_values, wait_for

import meshwright as mw
from meshwright.errors import UserError
from meshwright.launch import devices
from meshwright.launch.processes import reserved_port

LAUNCHER = """
import sys
from meshwright import load_run
from meshwright.launch.processes import train_in_processes
run_file, stub = sys.argv[1:]
more = [[sys.executable, "-c", stub]] if stub else []
sys.exit(train_in_processes(load_run(run_file), *more))
"""

STUB = """
import os, signal, sys, time
from pathlib import Path
from meshwright.launch import processes
rank, size, port, parent = map(int, sys.argv[1:])
{before}
processes.end_with(parent)
Path(f"run_of_{{rank}}.toml").write_text(sys.stdin.read())
print("words of worker", rank, flush=True)
Path(f"pid_{{rank}}.new").write_text(str(os.getpid()))
os.rename(f"pid_{{rank}}.new", f"pid_{{rank}}")
while len(list(Path().glob("pid_?"))) < size:
    time.sleep(0.01)
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
{body}
"""


# A real worker, which joins a real group, but for the training.
WITH_GROUP = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from meshwright import api
from meshwright.launch.processes import main
def train(run, group):
    import jax
    assert (jax.device_count(), jax.local_device_count()) == (2 * group.size, 2)
    print("words of a real worker")
    os.write(1, b"chatter of a library")
    group.barrier("start")
    Path(f"pid_{{group.rank}}").write_text(str(os.getpid()))
    {body}
    return SimpleNamespace(stopped_by=int(os.environ.get("STOPPED_BY", "0")))
api.train = train
main()
"""


def plain_environment() -> dict[str, str]:
    left_out = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    return {**{key: value for key, value in os.environ.items() if key not in left_out}, "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def launch(tmp_path):
    """Start a launcher whose workers run a piece of code; at the end of the test no process may be left."""
    launchers = []

    def start(
        body: str | None,
        *,
        before: str = "",
        stub: str = STUB,
        workers: int = 2,
        devices_per_worker: int = 0,
        **environment: str,
    ):
        section = {"kind": "processes", "workers": workers, "devices_per_worker": devices_per_worker}
        (tmp_path / "run.toml").write_text(mw.make_run(run_values("texts", launch=section)).to_toml())
        code = "" if body is None else stub.format(before=before, body=body)
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "run.toml", code],
            cwd=tmp_path,
            env={**plain_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        launchers.append(process)
        return process

    yield start
    for process in launchers:
        kill(process)


def pids(folder: Path, process: subprocess.Popen, workers: int = 2) -> list[int]:
    paths = [folder / f"pid_{rank}" for rank in range(workers)]
    wait_for(lambda: all(path.exists() for path in paths), process)
    return [int(path.read_text()) for path in paths]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # who adopted it may not ask for its exit code


def end_of(process: subprocess.Popen, within: float = 20) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def assert_gone(*processes: int, within: float = 0) -> None:
    end = time.monotonic() + within
    while time.monotonic() < end and any(map(is_alive, processes)):
        time.sleep(0.05)
    assert not any(map(is_alive, processes))


def test_all_is_well(launch, tmp_path):
    process = launch("", workers=3)
    workers = pids(tmp_path, process, 3)
    assert end_of(process) == (0, "words of worker 0\n", "")
    assert_gone(*workers)
    for rank in (1, 2):
        log = (tmp_path / f"runs/tiny/workers/worker_{rank}.log").read_text()
        assert log.endswith(f"\nwords of worker {rank}\n")
    assert not (tmp_path / "runs/tiny/workers/worker_0.log").exists()
    for rank in range(3):
        assert mw.load_run(tmp_path / f"run_of_{rank}.toml") == mw.load_run(tmp_path / "run.toml")


def test_a_worker_that_fails_ends_all_and_is_named(launch, tmp_path):
    log = tmp_path / "runs/tiny/workers/worker_1.log"
    log.parent.mkdir(parents=True)
    log.write_text("words of yesterday\n")
    last_words = "for n in range(30): print('line', n, '\\x1b[31m', file=sys.stderr)"
    # The other doesn't heed SIGTERM: it hangs in a collective.
    process = launch(
        f"if rank == 1:\n {last_words}\n sys.exit(3)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)"
    )
    workers = pids(tmp_path, process)
    code, _, err = end_of(process)
    assert code == 1
    assert_gone(*workers)
    first, *lines = err.splitlines()
    assert first == (
        f"error: worker 1 (process {workers[1]}) ended with exit code 3, and all were stopped. "
        "Its log is runs/tiny/workers/worker_1.log; it ends:"
    )
    assert lines == [f"  line {n} ␛[31m" for n in range(10, 30)]
    assert log.read_text().startswith("words of yesterday\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_ends_all_and_is_named(launch, tmp_path, rank):
    process = launch("time.sleep(100)")
    workers = pids(tmp_path, process)
    os.kill(workers[rank], signal.SIGKILL)
    code, _, err = end_of(process, within=8)
    assert code == 1
    assert_gone(*workers)
    assert err.startswith(f"error: worker {rank} (process {workers[rank]}) was killed by SIGKILL, as the system does")
    where = "workers/worker_1.log; it ends:\n  words of worker 1\n" if rank else "Its output is above.\n"
    assert err.endswith(where)


def test_the_first_to_fail_is_named_not_those_it_takes_along(launch, tmp_path):
    process = launch(
        "wait_for('gone')\nif rank == 0: sys.exit(1)\nif rank == 1: os.abort()\ntime.sleep(100)", workers=3
    )
    workers = pids(tmp_path, process, 3)
    os.kill(process.pid, signal.SIGSTOP)  # so that it sees all of them at once
    os.kill(workers[2], signal.SIGKILL)
    (tmp_path / "gone").touch()
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGCONT)
    assert f"worker 2 (process {workers[2]}) was killed by SIGKILL" in end_of(process)[2]


def test_a_mistake_of_the_user_is_shown_once(launch):
    say = "print('error: x = 1: must be 2', file=sys.stderr)"
    process = launch(f"if rank == 0: time.sleep(1)\n{say}\nos._exit(processes.USER_ERROR)")
    assert end_of(process)[::2] == (1, "error: x = 1: must be 2\n")


def test_a_mistake_that_one_worker_alone_finds_is_shown(launch):
    process = launch("if rank == 0: time.sleep(100)\nprint('error: x = 1')\nos._exit(processes.USER_ERROR)")
    code, _, err = end_of(process)
    assert code == 1
    assert "error: worker 1 (process" in err
    assert "stopped with an error, and all were stopped. Its log is runs/tiny/workers/worker_1.log; it ends:\n" in err
    assert err.endswith("  error: x = 1\n")


STOPS_TOGETHER = """
def stop(number, _):
    print("heard", number, flush=True)
    Path("stop").touch()
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
Path(f"ready_{rank}").touch()
wait_for("stop")
time.sleep(0.5)
sys.exit(128 + int(os.environ["SENT"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_worker_0_and_all_stop_together(launch, tmp_path, number):
    process = launch(STOPS_TOGETHER, SENT=str(int(number)))
    workers = pids(tmp_path, process)
    wait_for(lambda: len(list(tmp_path.glob("ready_?"))) == 2, process)
    os.killpg(process.pid, number)  # as a terminal's Ctrl-C does it
    assert end_of(process) == (128 + number, f"words of worker 0\nheard {int(number)}\n", "")
    assert "heard" not in (tmp_path / "runs/tiny/workers/worker_1.log").read_text()
    assert_gone(*workers)


def test_a_second_signal_ends_all_at_once(launch, tmp_path):
    process = launch(
        "signal.signal(signal.SIGTERM, lambda *_: Path('heard').touch())\ntime.sleep(100)\ntime.sleep(100)"
    )
    workers = pids(tmp_path, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "heard").exists, process)
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, within=3)[0] == 128 + signal.SIGTERM
    assert_gone(*workers)


def test_a_signal_before_training_has_begun(launch, tmp_path):
    process = launch("time.sleep(100)")
    workers = pids(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, within=8) == (128 + signal.SIGTERM, "words of worker 0\n", "")
    assert_gone(*workers)


def test_no_worker_outlives_a_launcher_that_is_killed(launch, tmp_path):
    # Worker 1 as on a system that isn't Linux.
    process = launch(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)", before="if rank == 1: sys.platform = 'other'"
    )
    workers = pids(tmp_path, process)
    assert all(map(is_alive, workers))
    process.kill()
    assert_gone(*workers, within=5)


def test_a_worker_whose_launcher_is_gone_already_ends(tmp_path):
    code = "import os; from meshwright.launch.processes import end_with; end_with(os.getppid() + 1); print('here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_run_directory_that_cannot_be_made(launch, tmp_path):
    (tmp_path / "runs").write_text("a file")
    code, _, err = end_of(launch(""))
    assert code == 1
    assert "run_dir = 'runs/tiny': can't be written to: Not a directory" in err


def test_a_real_worker_shows_a_mistake_as_its_line(launch, tmp_path):
    process = launch(None, devices_per_worker=2, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    code, out, err = end_of(process, within=60)
    assert (code, out) == (1, "")
    assert err == (
        "error: launch.devices_per_worker = 2: the environment asks for 4 "
        "(--xla_force_host_platform_device_count in XLA_FLAGS); leave one of them out, or make them the same\n"
    )


@pytest.mark.parametrize(("stopped_by", "expected"), [("0", 0), ("15", 143)])
def test_real_workers_join_and_leave(launch, stopped_by, expected):
    process = launch("", stub=WITH_GROUP, devices_per_worker=2, STOPPED_BY=stopped_by, http_proxy="http://127.0.0.1:9")
    assert end_of(process, within=60) == (expected, "words of a real worker\n", "")


def test_a_real_worker_that_raises_waits_for_no_one(launch, tmp_path):
    process = launch(
        "if group.rank == 1: raise ValueError('as it should')\n    time.sleep(100)",
        stub=WITH_GROUP,
        devices_per_worker=2,
    )
    workers = pids(tmp_path, process)
    code, _, err = end_of(process)
    assert code == 1
    assert err.startswith(f"error: worker 1 (process {workers[1]}) ended with exit code 1, and all were stopped.")
    assert err.endswith("ValueError: as it should\n")
    assert_gone(*workers)


def test_the_worker_that_all_others_lean_on_is_killed(launch, tmp_path):
    process = launch("time.sleep(100)", stub=WITH_GROUP, devices_per_worker=2, workers=3)
    workers = pids(tmp_path, process, 3)
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = end_of(process)
    assert code == 1
    assert err.startswith(f"error: worker 0 (process {workers[0]}) was killed by SIGKILL")
    assert_gone(*workers)


def test_a_reserved_port_is_no_one_elses():
    import socket

    with reserved_port() as port, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def make(**launch):
    return mw.make_run(run_values("texts", launch=launch))


PREPARE = """
import os, sys
import jax
from meshwright import make_run, UserError
from meshwright.launch.devices import prepare_devices
run = make_run({"data": {"train": "x"}, "model": {"preset": "gpt2-tiny"}}, [f"launch.devices_per_worker={sys.argv[1]}"])
for _ in range(2):
    try:
        prepare_devices(run)
    except UserError as error:
        print(error)
    print(jax.device_count())
"""


@pytest.mark.parametrize(
    ("wanted", "environment", "expected"),
    [
        ("3", {}, "3\n3\n"),
        ("0", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, "2\n2\n"),
        ("2", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_NUM_CPU_DEVICES": "2"}, "2\n2\n"),
        ("3", {"JAX_NUM_CPU_DEVICES": "2"}, "asks for 2 (JAX_NUM_CPU_DEVICES); leave one of them out"),
    ],
)
def test_virtual_devices(wanted, environment, expected):
    command = [sys.executable, "-c", PREPARE, wanted]
    environment = {**plain_environment(), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert expected in done.stdout, done.stderr


def test_a_jax_that_has_been_started_keeps_its_devices(monkeypatch):
    import jax

    monkeypatch.setattr(os, "environ", plain_environment())
    there = jax.local_device_count()
    devices.prepare_devices(make(devices_per_worker=there))
    with pytest.raises(UserError, match=f"devices_per_worker = {there + 1}: JAX has been started .* with {there}"):
        devices.prepare_devices(make(devices_per_worker=there + 1))


@pytest.mark.parametrize(
    ("visible", "workers", "each", "expected"),
    [
        (None, 2, 0, ["0,1", "2,3"]),
        (None, 3, 1, ["0", "1", "2"]),
        ("3, GPU-abc", 2, 0, ["3", "GPU-abc"]),
        ("2,-1,1", 1, 0, ["2"]),
        (None, 3, 0, r"launch\.workers = 3: 4 cards can't be shared equally; set .* to at most 1"),
        (None, 2, 3, r"launch\.workers = 2 with launch\.devices_per_worker = 3: needs 6 NVIDIA cards, and only 4 can"),
        ("", 2, 0, r"launch\.workers = 2: needs 2 NVIDIA cards, and none can be seen; lower it, or set JAX_PLATFORMS"),
    ],
)
def test_shares_of_the_cards(monkeypatch, visible, workers, each, expected):
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(devices, "_card_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = make(kind="processes", workers=workers, devices_per_worker=each)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            devices.shares_of_cards(run)
    else:
        assert devices.shares_of_cards(run) == [{"CUDA_VISIBLE_DEVICES": share} for share in expected]


def test_workers_on_a_cpu_share_no_cards():
    assert devices.shares_of_cards(make(kind="processes", workers=2, devices_per_worker=4)) == [{}, {}]


def test_more_cards_than_there_are(monkeypatch):
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.prepare_devices(make(devices_per_worker=1))
    with pytest.raises(UserError, match=r"launch\.devices_per_worker = 2: needs 2 NVIDIA cards, and only 1 can be"):
        devices.prepare_devices(make(devices_per_worker=2))
