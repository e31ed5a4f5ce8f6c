import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import write_corpus
from prepared import Documents, contents, prepare_one

from meshwright.data import encode, workers
from meshwright.data.documents import Document
from meshwright.data.encode import blocks
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.data.workers import Task, encode_in_order
from meshwright.errors import UserError

HERE = Path(__file__).parent
TEXTS = [f"{number} " + "some words and\n    more of them " * (1 + number * 7 % 90) for number in range(200)]


@pytest.fixture
def at_once(monkeypatch):
    """Workers from the first block on, and many blocks."""
    monkeypatch.setattr(workers, "ALONE_CHARACTERS", 0)
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 4000)


@pytest.fixture
def task(tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer")
    return Task(str(tmp_path / "tokenizer"))


def encoded(task: Task, texts=TEXTS, processes: int = 2) -> list:
    return list(encode_in_order(blocks(Documents(*texts)), task, ByteTokenizer(), processes))


@pytest.mark.parametrize("kind", ["bpe", "tiktoken:gpt2"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(make, tmp_path, at_once, kind):
    stores = []
    for processes in (1, 2, 3):
        data = {"store": str(tmp_path / f"by-{processes}"), "processes": processes, "deduplicate": True}
        run = make("mine", data=data, tokenizer={"kind": kind, "vocab_size": 300})
        texts = [*TEXTS, "", "half \ud83d", *TEXTS[50:60]]
        stores.append(contents(prepare_one(run, source=Documents(*texts)).path))
    assert stores[0] == stores[1] == stores[2]


def test_results_come_in_order_however_long_they_take(task, at_once, monkeypatch):
    here, there = encoded(task, processes=1), encoded(task, processes=3)
    assert len(there) > 30 and [mark for mark, _ in here] == [mark for mark, _ in there]
    for (_, one), (_, other) in zip(here, there, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and one.digests == other.digests


def test_only_a_few_blocks_are_read_ahead(task, at_once, monkeypatch):
    read = []

    class Counted(Documents):
        def documents(self):
            for document in super().documents():
                read.append(document.name)
                yield document

    for processes, most in ((1, 4), (2, 6)):
        del read[:]
        results = encode_in_order(blocks(Counted(*["x" * 5000] * 30)), task, ByteTokenizer(), processes)
        next(results)
        assert len(read) <= most
        results.close()
    del read[:]
    monkeypatch.setattr(workers, "BLOCK_CHARACTERS", 4000)
    results = encode_in_order(blocks(Counted(*["x" * 100_000] * 30)), task, ByteTokenizer(), 4)
    next(results)
    assert len(read) <= 2  # of long documents, fewer
    results.close()


def test_little_text_starts_no_process(task, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 4000)

    def fail(*arguments, **keywords):
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers.subprocess, "Popen", fail)
    assert len(encoded(task)) > 30
    monkeypatch.setattr(workers, "ALONE_CHARACTERS", 100_000)
    with pytest.raises(AssertionError):
        encoded(task)


def test_a_workers_error_comes_with_its_traceback(task, at_once):
    class Odd(Documents):
        def documents(self):
            yield Document("fine", "text")
            yield Document("odd", ["no", "text"])

    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*encode.py.*AttributeError"):
        list(encode_in_order(blocks(Odd()), task, ByteTokenizer(), 2))


def test_a_users_mistake_in_a_worker_is_one_line(task, at_once):
    (Path(task.tokenizer) / "spec.json").unlink()
    with pytest.raises(UserError, match=r"spec.json: missing or broken"):
        encoded(task)


def test_a_killed_worker_is_a_clear_error(task, at_once, monkeypatch):
    started = []
    start = workers._Worker.__init__
    monkeypatch.setattr(workers._Worker, "__init__", lambda self, task: (start(self, task), started.append(self))[0])
    results = encode_in_order(blocks(Documents(*TEXTS * 20)), task, ByteTokenizer(), 2)
    next(results)
    os.kill(started[0]._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"data.processes: .*killed by SIGKILL"):
        list(results)
    assert all(worker._process.poll() is not None for worker in started)


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
sys.path.insert(0, sys.argv[2])
from prepared import Documents
from meshwright.config import load_run
from meshwright.data import encode, workers
from meshwright.data.prepare import prepare
encode.BLOCK_CHARACTERS, workers.ALONE_CHARACTERS = 2000, 0
started = []
start = workers._Worker.__init__
workers._Worker.__init__ = lambda self, task: (start(self, task), started.append(self))[0]

def report(stage, done, *rest):
    if done > 100_000:
        print(*[worker._process.pid for worker in started], sorted({"jax", "grain"} & set(sys.modules)), flush=True)
        sys.stdin.readline()

prepare(load_run(sys.argv[1]), source=Documents(*(f"{i} words " * 300 for i in range(200))), on_progress=report)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(make, tmp_path, sent):
    (tmp_path / "run.toml").write_text(make("mine", data={"processes": 2}).to_toml())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run.toml"), str(HERE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    try:
        first, second, rest = parent.stdout.readline().split(maxsplit=2)
        os.killpg(parent.pid, sent)
        _, errors = parent.communicate(timeout=30)
    finally:
        parent.kill()
        parent.wait()
    assert rest.strip() == "[]" and parent.returncode == -sent
    if sent == signal.SIGINT:
        assert errors.count("Traceback") == 1  # none of a worker's
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in (first, second)):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.02)


def test_a_script_without_a_main_guard_is_not_run_again(make, tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "run.toml").write_text(make(tmp_path / "corpus", data={"processes": 2}).to_toml())
    (tmp_path / "script.py").write_text(
        "import sys\nprint('begun')\n"
        "from meshwright.config import load_run\nfrom meshwright.data import encode, workers\n"
        "from meshwright.data.prepare import prepare\n"
        "encode.BLOCK_CHARACTERS, workers.ALONE_CHARACTERS = 2000, 0\n"
        "prepare(load_run(sys.argv[1]))\n"
    )
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "begun\n" and done.stderr == ""


MEMORY = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from meshwright.config import load_run
from meshwright.data.documents import Document
from meshwright.data.prepare import prepare

class Many:
    def describe(self):
        return {"name": "many", "fingerprint": sys.argv[3]}

    def documents(self):
        for number in range(int(sys.argv[3])):
            yield Document(str(number), f"{number} some words of a document, and more of them. " * 20)

prepare(load_run(sys.argv[1]), source=Many())
# Not `RUSAGE_SELF`: that counts what this process was forked from.
(own,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(own) / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_memory_does_not_grow_with_the_corpus(make, tmp_path, processes):
    peaks = []
    for count in (10_000, 60_000):  # 10 and 60 MB
        data = {"processes": processes, "deduplicate": True, "store": str(tmp_path / f"store{count}")}
        (tmp_path / "run.toml").write_text(make("many", data=data).to_toml())
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "run.toml"), str(HERE), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        peaks.append([float(word) for word in done.stdout.split()])
    (few, few_worker), (many, many_worker) = peaks
    assert many < few + 25 and many_worker < few_worker + 25 and many < 250
