"""Runs whose directory lies on an object store: a real server of the S3 protocol, machines that share nothing else."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import MAIN, kill, object_store, run_values, wait_for, write_corpus, write_run

import meshwright as mw
from meshwright.checkpoints import Checkpoints
from meshwright.cli import main
from meshwright.errors import UserError
from meshwright.rundir import HEADER
from meshwright.storage import lease
from meshwright.storage.lease import Lease
from meshwright.storage.mirror import Mirror, Reader, local_run
from meshwright.storage.store import Store, copy_of, is_remote
from meshwright.track.console import PlainConsole
from meshwright.track.metrics import read_metrics

URL = "s3://runs/some/tiny"

HANGS_BEFORE_THE_MANIFEST = """
import time
from pathlib import Path
from meshwright.storage.mirror import Mirror
publish = Mirror.publish
def hanging(self, name, manifest):
    if name == "step_00000008":
        Path("hangs").touch()
        time.sleep(100)
    publish(self, name, manifest)
Mirror.publish = hanging
from meshwright.cli import main
main()
"""


@pytest.fixture(scope="module")
def server():
    with object_store() as variables:
        yield variables


@pytest.fixture(autouse=True)
def store(server, tmp_path, monkeypatch):
    """An empty bucket, and a machine that has seen nothing of it yet."""
    import boto3

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="runs")
    for item in client.list_objects_v2(Bucket="runs").get("Contents", []):
        client.delete_object(Bucket="runs", Key=item["Key"])
    monkeypatch.chdir(tmp_path)
    move(monkeypatch, "first")
    write_corpus(tmp_path / "texts")
    return Store(URL)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The directory, a folder, of the same run that nothing happens to."""
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_corpus(folder / "texts")
        train(make(run_dir=str(folder / "run")))
    return folder / "run"


def move(monkeypatch, machine: str) -> None:
    """To a machine with nothing on its disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("caches", machine).absolute()))


def make(**sections):
    return mw.make_run(run_values("texts", schedule={"kind": "constant"}, **{"run_dir": URL, **sections}))


def train(run):
    shown = io.StringIO()
    mw.train(run, console=PlainConsole(shown))
    return shown.getvalue()


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record}


def losses_in(store: Store) -> dict[int, float]:
    records = map(json.loads, (store.read("metrics.jsonl") or b"").splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def steps(store: Store) -> set[str]:
    return {name.split("/")[1] for name in store.names("checkpoints")}


def manifests(store: Store) -> set[str]:
    return {name.split("/")[1] for name in store.names("checkpoints") if name.count("/") == 2 and "manifest" in name}


def test_killed_before_the_manifest_it_goes_on_elsewhere_bit_for_bit(store, unbroken, monkeypatch):
    write_run(Path("run.toml"), run_values("texts", schedule={"kind": "constant"}, run_dir=URL))
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS_BEFORE_THE_MANIFEST, "train", "run.toml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(Path("hangs").exists, process, timeout=100)
        process.send_signal(signal.SIGKILL)
    finally:
        kill(process)
    assert manifests(store) == {"step_00000004"}
    assert "checkpoints/step_00000008/state/_METADATA" in store.names("checkpoints/step_00000008")
    written = losses_in(store)
    assert set(range(1, 5)) <= written.keys()  # what led up to the checkpoint was there before it
    move(monkeypatch, "second")
    shutil.rmtree("caches/first")
    shown = train(make())
    assert "resuming at step 4/12" in shown
    copy = copy_of(URL)
    assert losses(copy) == losses(unbroken) == losses_in(store)
    assert len(losses(copy)) == 12
    assert steps(store) == manifests(store) == {"step_00000008", "step_00000012"}
    assert {path.name for path in (copy / "checkpoints").iterdir()} == steps(store)
    assert ".lease.json" not in store.names()
    for name in ("run.toml", "report.html", "log.txt", *store.names("tokenizer")):
        assert store.read(name) == (copy / name).read_bytes()

    move(monkeypatch, "third")
    trained = mw.open_run(URL)
    assert trained.checkpoint.step == 12
    assert trained.evaluate() == mw.open_run(unbroken).evaluate()
    assert not (copy_of(URL) / "checkpoints/step_00000008/state").exists()  # what isn't needed isn't fetched
    move(monkeypatch, "fourth")
    shown = CliRunner().invoke(main, ["report", URL]).output.strip()
    assert shown == str(copy_of(URL) / "report.html")
    assert Path(shown).read_bytes() == store.read("report.html")


def test_a_checkpoint_damaged_in_the_store_is_passed_over_and_set_aside(store, unbroken, monkeypatch):
    train(make(train={"steps": 8}))
    name = next(name for name in store.names("checkpoints/step_00000008/state") if "/d/" in name)
    content = store.read(name)
    store.write(name, bytes(len(content)))
    assert "resuming at step 8/8" in train(make(train={"steps": 8}))  # here all is well
    move(monkeypatch, "second")
    shown = train(make())
    assert "step_00000008 skipped" in shown and "has other content than was written" in shown
    assert "resuming at step 4/12" in shown
    assert losses_in(store) == losses(unbroken)
    assert steps(store) == {"step_00000008", "step_00000008.damaged-1", "step_00000012"}
    aside = name.replace("step_00000008", "step_00000008.damaged-1")
    assert store.read(aside) == bytes(len(content))
    assert store.read(name) != store.read(aside)


def test_two_machines_that_share_nothing_but_the_store(store, unbroken, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"kind": "processes", "coordinator": f"127.0.0.1:{port}", "workers": 2, "devices_per_worker": 1}
    values = run_values("texts", schedule={"kind": "constant"}, run_dir=URL, launch=launch, mesh={"fsdp": 2})

    def by_hand(steps: int, *machines: str) -> list[str]:
        write_run(Path("run.toml"), {**values, "train": {**values["train"], "steps": steps}})
        workers = [
            subprocess.Popen(
                [*MAIN, "train", "run.toml", f"launch.index={index}"],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / f"caches/{machine}")},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for index, machine in enumerate(machines)
        ]
        try:
            words = [worker.communicate(timeout=120) for worker in workers]
        finally:
            for worker in workers:
                kill(worker)
        assert [worker.returncode for worker in workers] == [0, 0], words
        return [out for out, _ in words]

    by_hand(4, "a", "b")
    first, second = (set(names(tmp_path / "caches" / machine)) for machine in ("a", "b"))
    assert "metrics.jsonl" in first - second
    assert not [name for name in first | second if ".partial" in name]
    state = store.names("checkpoints/step_00000004/state")
    here = [name for name in first if name.startswith("checkpoints/step_00000004/state/")]
    assert set(here) < set(state)  # the other machine's part came from there
    assert "resuming at step 4/8" in by_hand(8, "c", "c")[0]
    log = (store.read("workers/worker_1.log") or b"").decode()
    assert len(re.findall(r"^--- 20\d\d-", log, re.MULTILINE)) == 2  # both calls, though on other machines
    move(monkeypatch, "second")
    assert "resuming at step 8/12" in train(make())  # on one device
    assert losses_in(store) == pytest.approx(losses(unbroken), rel=1e-5)
    assert losses_in(store) != losses(unbroken)
    assert len(losses_in(store)) == 12


def names(machine: Path) -> list[str]:
    (copy,) = (machine / "meshwright/runs").iterdir()
    return [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]


@pytest.fixture
def short(monkeypatch):
    for name, seconds in (("_RENEW_SECONDS", 0.2), ("_SECONDS", 2.5), ("_SETTLE_SECONDS", 0.05)):
        monkeypatch.setattr(lease, name, seconds)


def test_of_two_that_train_there_the_second_is_refused(store, short):
    notes: list[str] = []
    first = Lease(store, notes.append)
    assert not notes
    with pytest.raises(UserError, match=r"process \d+ of .* is training in this run directory; wait for it, stop it"):
        as_another_machine(store, notes.append)
    assert notes[0].startswith("waiting up to 2.5 s to see whether process ")
    first.check()
    first.close()
    as_another_machine(store, notes.append).close()


def as_another_machine(store: Store, note) -> Lease:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_place", lambda: "elsewhere")
        return Lease(store, note)


def test_one_that_died_elsewhere_is_waited_for_and_commits_nothing_when_it_wakes(store, short, monkeypatch):
    mirror = Mirror(URL)
    mirror._lease._ended.set()  # it renews no more
    time.sleep(0.3)
    began = time.monotonic()
    second = as_another_machine(store, lambda _: None)
    assert time.monotonic() - began > 2
    Path("manifest.json").write_text("{}")
    with pytest.raises(UserError, match="is training in this run directory"):
        mirror.publish("step_00000004", Path("manifest.json"))
    assert not store.names("checkpoints")
    second.check()
    second.close()


def contents(store: Store) -> dict[str, bytes | None]:
    return {name: store.read(name) for name in store.names() if name != ".lease.json"}


def part_of_a_checkpoint(mirror: Mirror, name: str, words: str) -> Path:
    partial = mirror.partial(name)
    partial.mkdir(parents=True)
    (partial / "state").write_text(words)
    (partial / "manifest.json").write_text("{}")
    (mirror.copy / "metrics.jsonl").write_text(words)
    return partial


@pytest.mark.parametrize("it_ended", [False, True], ids=["which still trains", "which has ended"])
def test_one_that_wakes_touches_nothing_of_the_one_that_took_over(store, short, monkeypatch, it_ended):
    name = "step_00000004"
    first = Mirror(URL)
    first._lease._ended.set()  # it renews no more
    move(monkeypatch, "second")
    monkeypatch.setattr(lease, "_place", lambda: "elsewhere")
    monkeypatch.setattr(lease, "_LONG_GONE_SECONDS", -1.0)
    second = Mirror(URL)
    theirs = part_of_a_checkpoint(second, name, "the second's")
    second.upload(theirs, name)
    second.publish(name, theirs / "manifest.json")
    if it_ended:
        second.__exit__(None, None, None)
    before = contents(store)
    assert before["metrics.jsonl"] == before[f"checkpoints/{name}/state"] == b"the second's"
    mine = part_of_a_checkpoint(first, name, "the first's")
    expected = "another process has trained here since; start again" if it_ended else "is training in this run dir"
    for call in (
        lambda: first.upload(mine, name),
        lambda: first.publish(name, mine / "manifest.json"),
        lambda: first.remove(name),
        lambda: first.__exit__(None, None, None),
    ):
        with pytest.raises(UserError, match=f"^run_dir = '{URL}': .*{expected}"):
            call()
        assert contents(store) == before
    if not it_ended:
        second.__exit__(None, None, None)


def test_what_is_still_being_saved_when_training_ends_is_refused(store, short):
    go_on = threading.Event()

    def save(mirror: Mirror) -> Checkpoints:
        checkpoints = Checkpoints(mirror.copy / "checkpoints", 3, reader=mirror)
        checkpoints.sweep()

        def write(folder: Path):
            (folder / "state").write_text("x")
            return lambda: go_on.wait(60) and None

        checkpoints.save(write, {"step": 4, "val_loss": None, "identity": {}})
        return checkpoints

    with Mirror(URL) as mirror:
        late = save(mirror)
    go_on.set()
    with pytest.raises(UserError, match="start again, which goes on from the newest checkpoint"):
        late.wait()
    assert not store.names()
    with Mirror(URL) as mirror:
        save(mirror).wait()
    assert store.names() == ["checkpoints/step_00000004/manifest.json", "checkpoints/step_00000004/state"]


def test_a_lease_that_is_being_renewed_while_it_is_given_up_is_gone(store, short, monkeypatch):
    holder = Lease(store, print)
    writing, go_on, write = threading.Event(), threading.Event(), store.write

    def slow(name: str, content: bytes) -> None:
        writing.set()
        go_on.wait(60)
        write(name, content)

    monkeypatch.setattr(store, "write", slow)
    assert writing.wait(60)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(holder.close)
        time.sleep(0.3)
        go_on.set()
        closing.result(60)
    time.sleep(0.3)
    assert not store.names()


def test_one_that_leaves_while_it_is_looked_at_is_gone(store, short, monkeypatch):
    first, age = as_another_machine(store, print), store.age

    def leaving(name: str) -> float | None:
        first.close()
        return age(name)

    monkeypatch.setattr(store, "age", leaving)
    notes: list[str] = []
    Lease(store, notes.append).close()
    assert not notes


@pytest.mark.parametrize("how", ["its process is gone", "the job is the same", "it is long ago"])
def test_who_need_not_wait(store, short, monkeypatch, how):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setenv(lease.JOB, "job 7" if how == "the job is the same" else "")
    first = Lease(store, print)
    first._ended.set()
    if how == "its process is gone":
        first._mine |= {"process": process.pid}
        first._write()
    if how == "it is long ago":
        monkeypatch.setattr(lease, "_LONG_GONE_SECONDS", -1.0)
    notes: list[str] = []
    second = Lease(store, notes.append) if how == "its process is gone" else as_another_machine(store, notes.append)
    assert not notes
    second.close()


def test_what_is_being_trained_here_is_read_as_it_is(store):
    store.write("run.toml", HEADER.encode())
    with Mirror(URL) as mirror:
        (mirror.copy / "run.toml").write_text("newer")
        assert local_run(URL) == mirror.copy
        assert (mirror.copy / "run.toml").read_text() == "newer"
    assert store.read("run.toml") == b"newer"
    store.write("run.toml", b"newer yet")
    assert (local_run(URL) / "run.toml").read_text() == "newer yet"


@pytest.mark.parametrize("first", [local_run, Mirror], ids=["another reads it", "training starts"])
def test_one_who_reads_waits_until_what_is_being_fetched_here_is_whole(store, short, monkeypatch, first):
    store.write("run.toml", HEADER.encode())
    began, go_on, fetch = threading.Event(), threading.Event(), Reader.fetch_small_files

    def slow(self: Reader, *, logs: bool = True) -> None:
        began.set()
        go_on.wait(60)
        fetch(self, logs=logs)

    monkeypatch.setattr(Reader, "fetch_small_files", slow)
    with ThreadPoolExecutor() as threads:
        other = threads.submit(first, URL)
        assert began.wait(60)
        one = threads.submit(local_run, URL)
        time.sleep(0.3)
        waited = not one.done()
        go_on.set()
        assert (one.result(60) / "run.toml").read_text() == HEADER
        assert waited
        if first is Mirror:
            other.result(60).__exit__(None, None, None)
        assert local_run(URL) == one.result()


def test_a_users_own_objects_are_left_alone(store, short):
    theirs = {"run.toml": b"# mine\n", "checkpoints/step_00000100/weights.bin": b"of another tool"}
    for name, content in theirs.items():
        store.write(name, content)
    with pytest.raises(
        UserError, match=r"its run\.toml would be overwritten by the resolved run file; set run_dir to"
    ) as refused:
        Mirror(URL)
    assert {name: store.read(name) for name in store.names()} == theirs
    assert (local_run(URL) / "run.toml").read_text() == "# mine\n"  # it isn't taken for one that is trained in
    assert refused.tb  # which keeps the mirror, and thus what it hasn't closed
    store.remove(["run.toml"])
    copy_of(URL).joinpath("run.toml").unlink()
    with Mirror(URL):
        pass
    assert contents(store) == {name: content for name, content in theirs.items() if name != "run.toml"}
    store.write("run.toml", HEADER.encode())
    with Mirror(URL):
        pass
    assert store.names() == ["run.toml"]  # of a run of Meshwright's it is what a crash left


def test_what_was_compiled_stays_on_its_machine(store, short):
    store.write("workers/compiled/theirs", b"x")
    store.write("workers/worker_1.log", b"x")
    with Mirror(URL) as mirror:
        (mirror.copy / "workers/compiled").mkdir(parents=True)
        for name in ("workers/compiled/mine", "workers/worker_0.log"):
            (mirror.copy / name).write_text("x")
    assert store.names() == ["workers/compiled/theirs", "workers/worker_0.log", "workers/worker_1.log"]
    folder = local_run(URL)
    assert (folder / "workers/worker_1.log").exists()
    assert not (folder / "workers/compiled/theirs").exists()


def test_small_files_that_could_not_be_written_come_with_the_next(store, short, monkeypatch):
    def fail(name: str, content: bytes) -> None:
        raise TimeoutError("no answer")

    with Mirror(URL) as mirror:
        for name in ("log.txt", "run.toml"):
            (mirror.copy / name).write_text(f"{HEADER}{name}")
        with monkeypatch.context() as patched:
            patched.setattr(mirror.store, "write", fail)
            with pytest.raises(TimeoutError, match="no answer"):
                mirror._push_small_files()
    assert {"log.txt", "run.toml"} <= set(store.names())


def test_an_older_checkpoint_that_cannot_be_removed_ends_nothing(store, short, monkeypatch):
    def fail(name: str) -> None:
        raise TimeoutError("no answer")

    def save(step: int) -> None:
        checkpoints.save(lambda folder: lambda: None, {"step": step, "val_loss": None, "identity": {}})
        checkpoints.wait()

    told: list = []
    with Mirror(URL) as mirror:
        folder = mirror.copy / "checkpoints"
        checkpoints = Checkpoints(
            folder, 1, on_committed=lambda one: told.append(one.step), note=told.append, reader=mirror
        )
        save(4)
        with monkeypatch.context() as patched:
            patched.setattr(mirror, "remove", fail)
            save(8)
        assert told == [4, "older checkpoints could not be removed (no answer); the next save tries again", 8]
        assert manifests(store) == {"step_00000004", "step_00000008"}
        save(12)
    assert told[3:] == [12] and manifests(store) == {"step_00000012"}


def test_the_log_of_a_worker_that_was_here_before(store, short):
    theirs, mine = "workers/worker_1.log", "workers/worker_0.log"
    store.write(theirs, b"--- first\n--- second, elsewhere\n")
    store.write(mine, b"--- first\nwords\n--- second, elsewhere\n")
    folder = copy_of(URL) / "workers"
    folder.mkdir(parents=True)
    (folder / "worker_1.log").write_text("--- first\n")
    (folder / "worker_0.log").write_text("--- first\nwords\n--- third\n")
    with Mirror(URL):
        pass
    assert store.read(theirs) == b"--- first\n--- second, elsewhere\n"
    assert store.read(mine) == b"--- first\nwords\n--- second, elsewhere\n--- third\n"


def test_a_log_that_goes_on_from_the_one_in_the_store_stays(store):
    store.write("log.txt", b"one\n")
    folder = local_run(URL)
    (folder / "log.txt").write_text("one\ntwo\n")
    assert (local_run(URL) / "log.txt").read_text() == "one\ntwo\n"
    store.write("log.txt", b"one\nother\n")
    assert (local_run(URL) / "log.txt").read_text() == "one\nother\n"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://", "must be a folder, s3://bucket/path or gs://bucket/path"),
        ("az://bucket/x", "must be a folder, s3://bucket/path or gs://bucket/path"),
        ("s3://nowhere/x", r"can't be read \(The specified bucket does not exist\); see that the bucket is there"),
    ],
)
def test_what_is_no_run_directory(url, expected):
    with pytest.raises(UserError, match=expected):
        train(make(run_dir=url))


def test_without_credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match=r"can't be read \(Unable to locate credentials\)"):
        Store("s3://runs/other")


def test_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})
    with pytest.raises(UserError, match=r"needs the extra 's3'; install it: pip install 'meshwright\[s3\]'"):
        Store(URL)


def test_folders_are_folders():
    assert not is_remote("") and not is_remote("runs/x") and not is_remote(Path("/tmp/s3/x"))
    assert is_remote("s3://bucket/x") and is_remote("gs://bucket")
    assert make().place == URL and make(run_dir="runs/x").place == Path("runs/x")
    assert copy_of("s3://bucket/x") == copy_of("s3://bucket/x/") != copy_of("gs://bucket/x")
