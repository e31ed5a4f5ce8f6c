import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import kill, wait_for, write_corpus
from prepared import Documents, contents, documents, prepare_one

from meshwright.data import encode, make, writer
from meshwright.data.documents import Document
from meshwright.data.partial import MARKER
from meshwright.data.prepare import prepare
from meshwright.data.store import Store
from meshwright.errors import UserError

HERE = Path(__file__).parent


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Texts, some of them twice, some that can't be used."""
    folder = write_corpus(tmp_path / "corpus", documents=80)
    for number in (3, 30, 77):
        (folder / f"{number:03}-again.txt").write_bytes((folder / f"{number:03}.txt").read_bytes())
        (folder / f"{number:03}-bad.txt").write_bytes(b"\xff")
    return folder


@pytest.fixture
def small(monkeypatch):
    """Small blocks, commits and shards."""
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 2000)
    monkeypatch.setattr(make, "COMMIT_BYTES", 6000)
    monkeypatch.setattr(writer, "SHARD_TOKENS", 7000)


def killed_over_and_over(run, tmp_path: Path, **options) -> dict:
    (tmp_path / "run.toml").write_text(run.to_toml())
    program = [sys.executable, HERE / "killed_prepare.py", tmp_path / "run.toml", json.dumps({"seed": 0, **options})]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "data",
    [
        {"processes": 1},
        {"processes": 1, "deduplicate": True, "normalize": "nfc"},
        {"processes": 1, "deduplicate": True, "validation": "held-out"},
        {"processes": 1, "chat": "chatml", "train": "talks.jsonl"},
    ],
    ids=["plain", "deduplicated", "validation of its own", "conversations"],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(make, corpus, tmp_path, data):
    if data.get("validation"):
        write_corpus(tmp_path / "held-out", documents=20, seed=1)
        (tmp_path / "held-out" / "known.txt").write_bytes((corpus / "005.txt").read_bytes())
        data = {**data, "validation": str(tmp_path / "held-out")}
    if data.get("train"):
        messages = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[:90]}] for t in TEXTS]
        data = {**data, "train": str(tmp_path / "talks.jsonl")}
        Path(data["train"]).write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in messages))
    result = killed_over_and_over(make(corpus, data=data), tmp_path, points=24)
    assert result["wrong"] == [] and result["moments"] > 70
    assert result["points"] >= 20 and result["gone_on"] >= 5


def test_killed_with_workers_it_goes_on_to_the_same_bytes(make, corpus, tmp_path):
    run = make(corpus, data={"processes": 2, "deduplicate": True}, tokenizer={"kind": "bpe", "vocab_size": 300})
    result = killed_over_and_over(run, tmp_path, points=4)
    assert result["wrong"] == [] and result["points"] == 4


def test_it_goes_on_after_kills_at_random_times(tmp_path, make):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(60):
        (corpus / f"{number:02}.txt").write_text(f"{number} " + f"word{number % 7} and another; " * 4000)
    run = make(corpus, tokenizer={"kind": "bpe", "vocab_size": 300}, data={"processes": 2})
    (tmp_path / "run.toml").write_text(run.to_toml())
    program = """
import sys
from meshwright.config import load_run
from meshwright.data import encode, make, workers
from meshwright.data.prepare import prepare
encode.BLOCK_CHARACTERS, make.COMMIT_BYTES, workers.ALONE_CHARACTERS = 1 << 17, 1 << 19, 1 << 20
prepare(load_run(sys.argv[1]))
"""

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", program, str(tmp_path / "run.toml")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    assert start().wait(60) == 0
    unbroken = contents(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "unbroken")
    state = tmp_path / "store.partial" / "state.json"
    for commits in (None, 0, 1, 4):
        process = start()
        try:
            wait_for(lambda: commits is None or (state.exists() and committed(state) >= commits), process)  # noqa: B023
            time.sleep(random.uniform(0, 0.1))
        finally:
            kill(process)
    assert start().wait(60) == 0
    assert contents(tmp_path / "store") == unbroken and not list(tmp_path.glob("store.partial*"))


def committed(state: Path) -> int:
    return json.loads(state.read_text()).get("commits", 0)


class Stopping(Documents):
    """A source that breaks off, unless it is whole; counts how often a document was read."""

    def __init__(self, *texts: str, ends_after: int) -> None:
        super().__init__(*texts)
        self.ends_after = ends_after
        self.read = 0

    def documents(self):
        for document in super().documents():
            if self.read == self.ends_after:
                raise ConnectionError("the archive went away")
            self.read += 1
            yield document


TEXTS = [f"document {number}: " + "some words " * 60 for number in range(60)]


def test_a_source_of_ones_own_is_gone_on_with_by_counting(make, tmp_path, small):
    whole = prepare_one(make("mine", data={"store": str(tmp_path / "whole")}), source=Documents(*TEXTS))
    with pytest.raises(ConnectionError):
        prepare(make("mine"), source=Stopping(*TEXTS, ends_after=40))
    state = json.loads((tmp_path / "store.partial" / "state.json").read_text())
    assert 10 < state["mark"][0] < 40
    store = prepare_one(make("mine"), source=Documents(*TEXTS))
    assert contents(store.path) == contents(whole.path)


class Placed:
    """A source that can be read on from a place."""

    bytes_read = 0

    def __init__(self) -> None:
        self.after: list = []

    def describe(self):
        return {"name": "placed", "fingerprint": "1", "bytes": 10 * len(TEXTS)}

    def documents(self, after=None):
        self.after.append(after)
        for number, text in enumerate(TEXTS):
            self.bytes_read = 10 * (number + 1)
            if after is None or (0, number) > after:
                yield Document(str(number), text, place=(0, number))


def test_a_source_with_places_is_read_on_from_the_committed_one(make, tmp_path, small):
    reports = []

    def stop_late(*report):
        reports.append(report)
        if report[1] > 400:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        prepare(make("mine"), source=Placed(), on_progress=stop_late)
    source = Placed()
    store = prepare_one(make("mine"), source=source, on_progress=lambda *report: reports.append(report))
    ((_, number),) = source.after
    assert 20 < number < 45
    assert reports[-1][:3] == ("encode", 600, 600) and reports[-1][4] == 60
    assert sorted(documents(store, "train") + documents(store, "validation")) == sorted(TEXTS)


def test_a_trained_tokenizer_is_kept(make, corpus, tmp_path, monkeypatch):
    run = make(corpus, tokenizer={"kind": "bpe", "vocab_size": 300})

    def fail(*arguments):
        raise ConnectionError

    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr("meshwright.data.prepare.make_store", fail)
        prepare(run)
    stages = []
    monkeypatch.setattr("meshwright.data.prepare.train_bpe", fail)
    prepare(run, on_progress=lambda stage, *rest: stages.append(stage))
    assert set(stages) == {"encode"}


def stopped(run, texts=TEXTS) -> None:
    with pytest.raises(ConnectionError):
        prepare(run, source=Stopping(*texts, ends_after=40))


def test_work_on_something_else_is_begun_anew(make, tmp_path, small):
    for number, data in enumerate(({"validation": 0.4}, {"normalize": "nfc"}, {"deduplicate": True}, None)):
        store = {"store": str(tmp_path / str(number))}
        stopped(make("mine", data=store))
        source = Stopping(*(TEXTS if data else reversed(TEXTS)), ends_after=1000)
        made = prepare_one(make("mine", data={**store, **(data or {})}), source=source)
        fresh = prepare_one(make("mine", data={"store": f"{tmp_path}/fresh{number}", **(data or {})}), source=source)
        assert contents(made.path) == contents(fresh.path)


def test_damaged_work_is_begun_anew(make, tmp_path, small):
    whole = prepare_one(make("mine", data={"store": str(tmp_path / "whole")}), source=Documents(*TEXTS))
    for name in ("train_documents.bin", "tokenizer/spec.json", "state.json"):
        stopped(make("mine"))
        (tmp_path / "store.partial" / name).write_text("{}")
        store = prepare_one(make("mine"), source=Documents(*TEXTS))
        assert contents(store.path) == contents(whole.path)
        store.path.rename(tmp_path / f"done-{Path(name).name}")


def test_nothing_is_left_beside_after_an_early_failure(make, tmp_path):
    with pytest.raises(ConnectionError):
        prepare(make("mine"), source=Stopping(*TEXTS, ends_after=50))
    assert list(tmp_path.iterdir()) == []


def test_a_users_folder_in_the_way_is_left_alone(make, corpus, tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "notes.txt").write_text("a user's")
    with pytest.raises(UserError, match=r"store.partial: in the way"):
        prepare(make(corpus))
    assert (tmp_path / "store.partial" / "notes.txt").read_text() == "a user's"


@pytest.mark.parametrize("there", [False, True])
def test_a_link_to_another_disk_is_followed(make, tmp_path, there):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "mine").mkdir()
    (tmp_path / "store").symlink_to(disk / "mine")
    store = prepare_one(make("mine"), source=Documents(*TEXTS))
    assert store.path == tmp_path / "store" and [path.name for path in disk.iterdir()] == ["mine"]
    assert store.split("train").document_count > 30 and (tmp_path / "store").is_symlink()


def test_a_full_disk_is_a_clear_error_and_leaves_the_work(make, tmp_path, small, monkeypatch):
    whole = prepare_one(make("mine", data={"store": str(tmp_path / "whole")}), source=Documents(*TEXTS))
    (tmp_path / "run.toml").write_text(make("mine").to_toml())
    program = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_prepare_resume import TEXTS
from prepared import Documents
from meshwright.config import load_run
from meshwright.data import encode, make, writer
from meshwright.data.prepare import prepare
import errno, os
encode.BLOCK_CHARACTERS, make.COMMIT_BYTES, writer.SHARD_TOKENS = 2000, 6000, 7000
# Where files can't grow any more, the system gives another error than on a full disk: that is put right here.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
errno.ENOSPC = errno.EFBIG
prepare(load_run(sys.argv[1]), source=Documents(*TEXTS))
"""
    arguments = [str(tmp_path / "run.toml"), str(HERE), "12000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    died = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert "make room and the same command goes on" in died.stderr
    assert (tmp_path / "store.partial" / "state.json").exists()
    store = prepare_one(make("mine"), source=Documents(*TEXTS))
    assert contents(store.path) == contents(whole.path)


def test_the_second_of_two_at_once_waits_and_opens_what_the_first_made(make, corpus, tmp_path):
    run = make(corpus)
    (tmp_path / "run.toml").write_text(run.to_toml())
    program = """
import sys
from meshwright.config import load_run
from meshwright.data.prepare import prepare

def note(text):
    print(text, flush=True)

done = prepare(load_run(sys.argv[1]), on_progress=lambda *report: print("worked"), on_note=note)
print(done.fingerprint)
"""
    others, told = [], []

    def first_report(*report):
        if not others:
            for _ in range(2):
                command = [sys.executable, "-c", program, str(tmp_path / "run.toml")]
                others.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            told.extend(other.stdout.readline() for other in others)

    try:
        outer = prepare_one(run, on_progress=first_report)
        ends = [other.communicate(timeout=60)[0].split() for other in others]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert all("another process is making" in line and "waiting" in line for line in told)
    assert ends == [[outer.fingerprint]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "run.toml", "store"]


def test_one_that_waits_for_a_killed_one_goes_on(make, tmp_path, small):
    whole = prepare_one(make("mine", data={"store": str(tmp_path / "whole")}), source=Documents(*TEXTS))
    notes, made = [], []
    second = threading.Thread(
        target=lambda: made.append(prepare_one(make("mine"), source=Documents(*TEXTS), on_note=notes.append))
    )

    def fail_late(stage, done, *rest):
        if done > 20_000:
            second.start()
            while not notes:
                time.sleep(0.01)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        prepare(make("mine"), source=Documents(*TEXTS), on_progress=fail_late)
    second.join(30)
    assert len(notes) == 1 and contents(made[0].path) == contents(whole.path)


def test_what_a_kill_at_the_last_moment_leaves_is_removed(make, corpus):
    store = prepare_one(make(corpus))
    clean = contents(store.path)
    (store.path / MARKER).write_text("{}")
    assert contents(prepare_one(make(corpus)).path) == clean == contents(Store.open(store.path).path)
