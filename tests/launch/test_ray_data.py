"""On a real Ray cluster of two nodes on this machine, one CPU each; and on the local ones that the commands start."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import MAIN, WORDS, run_values

from meshwright.api import open_run, prepare, train
from meshwright.config import Run, make_run
from meshwright.data.sources import open_source
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.data.workers import Task
from meshwright.errors import UserError
from meshwright.launch import ray_data
from meshwright.launch.ray_data import RayEncoding, encode_groups, group_parts, make_work
from meshwright.launch.ray_stream import StreamFeed
from meshwright.track.console import make_console

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from prepared import Documents, contents

MARK = "MESHWRIGHT_TEST_OF"


@pytest.fixture(scope="module")
def address():
    """Of a cluster of two nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def ray(address):
    """The module, connected to the cluster."""
    import ray

    ray.init(address=address, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """JSON lines in six files, one compressed; some documents twice, some that can't be used. Each file is a group."""
    monkeypatch.setattr(ray_data, "GROUP_BYTES", 1)
    choose, folder = random.Random(0), tmp_path / "corpus"
    folder.mkdir()
    for file in range(6):
        texts = [f"{file} {line} " + " ".join(choose.choices(WORDS, k=300)) for line in range(150)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines[5:8] = [lines[3], "{bad", json.dumps({"text": "a\0b"})]
        data = "\n".join(lines).encode()
        path = folder / f"{file}.jsonl"
        if file == 2:
            path, data = path.with_suffix(".jsonl.gz"), gzip.compress(data)[:-9]
        path.write_bytes(data)
    return folder


def a_run(text: Path | str | list, store: Path, **sections: dict) -> Run:
    values = run_values("", **sections)
    values["data"] |= {"train": text if isinstance(text, list) else str(text), "store": str(store)}
    return make_run(values)


def both_ways(text: Path | str, folder: Path, address: str, source=None, **sections) -> tuple[dict, dict]:
    """The contents of the stores made without Ray, and on the cluster."""
    prepare(a_run(text, folder / "here", **sections), source=source, console=_console())
    launch = {"launch": {"kind": "ray", "address": address}}
    prepare(a_run(text, folder / "there", **sections, **launch), source=source, console=_console())
    return contents(folder / "here"), contents(folder / "there")


def _console():
    return make_console(open(os.devnull, "w"))


def marked(mark: str) -> dict[int, str]:
    """The processes whose environment has a mark, and their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
    return found


def left_of(mark: str, late: tuple[str, ...] = ()) -> list[str]:
    """The command lines of the processes with a mark that aren't gone in a minute; they are killed.

    Arguments:
        mark: as in the environment.
        late: parts of the command lines of processes that aren't waited for, nor given.
    """
    end = time.monotonic() + 60
    while left := marked(mark):
        waited_for = [line for line in left.values() if not any(name in line for name in late)]
        if not waited_for or time.monotonic() > end:
            break
        time.sleep(0.1)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return waited_for if left else []


def test_the_store_has_the_bytes_of_the_local_one(corpus, tmp_path, address):
    data = {"deduplicate": True, "normalize": "nfc", "validation": 0.1}
    here, there = both_ways(corpus, tmp_path, address, data=data, tokenizer={"kind": "bpe", "vocab_size": 300})
    assert here == there
    manifest = json.loads((tmp_path / "there" / "manifest.json").read_text())
    assert manifest["duplicates"] == 6 and manifest["left_out"]["kinds"] == {
        "invalid JSON": 6,
        "NUL byte": 6,
        "truncated gzip": 1,
    }


@pytest.mark.slow
def test_conversations_have_their_weights_and_a_validation_source_comes_first(corpus, tmp_path, address):
    for name, many in (("train", 400), ("held-out", 20)):
        talks = [
            {"messages": [{"role": "user", "content": f"{name} {i}?"}, {"role": "assistant", "content": WORDS[i % 9]}]}
            for i in range(many)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, talks)))
    data = {"chat": "chatml", "validation": str(tmp_path / "held-out.jsonl")}
    here, there = both_ways(tmp_path / "train.jsonl", tmp_path, address, data=data)
    assert here == there and any(name.endswith(".weights") for name in there)


@pytest.mark.slow
def test_pairs_of_answers_keep_both_texts(tmp_path, address):
    rows = [{"prompt": f"{i}?", "chosen": WORDS[i % 9], "rejected": f"not {i}"} for i in range(400)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = make_run(run_values("")).model.model_dump() | {"init": "hf:nowhere"}
    sections = {"engine": "torch", "lora": {"rank": 2}, "model": model}
    data = {"chat": "chatml", "packing": "pairs"}
    here, there = both_ways(tmp_path / "pairs.jsonl", tmp_path, address, data=data, **sections)
    assert here == there and max((tmp_path / "there" / "train_00000.weights").read_bytes()) == 3


def test_a_source_from_python_is_read_in_the_driver(corpus, tmp_path, address):
    source = Documents(*(f"{number} " + " ".join(WORDS) for number in range(3000)))
    here, there = both_ways("mine", tmp_path, address, source=source)
    assert here == there


@pytest.mark.slow
def test_both_nodes_encode(ray):
    module = ModuleType("of_the_test")
    exec(  # pickled by value: the nodes don't have this file
        """
from meshwright.data.documents import Document
from meshwright.data.tokenizer import ByteTokenizer
class Part:
    bytes_read = 0
    def __init__(self, number): self.number = number
    def describe(self): return {"bytes": 1 << 30}
    def documents(self, after=None): yield Document("a", "text", place=(self.number, 0))
class All:
    def parts(self): return [Part(number) for number in range(12)]
class Node(ByteTokenizer):
    def encode_batch(self, texts):
        import ray, time
        time.sleep(0.5)
        return super().encode_batch([ray.get_runtime_context().get_node_id() for _ in texts])
""",
        module.__dict__,
    )
    sys.modules["of_the_test"] = module
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        groups, _ = group_parts(module.All().parts())
        tokenizer = ray.cloudpickle.dumps((module.Node(), None))
        work = ray.put(make_work(module.All(), ByteTokenizer(), None, "none")._replace(tokenizer=tokenizer))
        found = [ByteTokenizer().decode(block.tokens) for _, _, block in encode_groups(ray, work, groups)]
    finally:
        del sys.modules["of_the_test"]
    assert len(found) == 12 and set(found) == {node["NodeID"] for node in ray.nodes()}


@pytest.mark.slow
def test_killed_on_one_cpu_it_goes_on_on_two_to_the_same_bytes(corpus, tmp_path, address, monkeypatch):
    run = a_run(corpus, tmp_path / "there", data={"deduplicate": True}, launch={"kind": "ray"})
    (tmp_path / "run.toml").write_text(run.to_toml())
    program = """
import logging, os, pathlib, signal, sys, ray
from meshwright.config import load_run
from meshwright.data import make
from meshwright.data.prepare import prepare
from meshwright.launch import ray_data
make.COMMIT_BYTES = ray_data.GROUP_BYTES = 1
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level=logging.CRITICAL)
blocks = 0
def progress(*report):
    global blocks
    blocks += report[0] == "encode"
    if blocks == 4:
        os.kill(os.getpid(), signal.SIGKILL)
run = load_run(sys.argv[1])
prepare(run, encode=ray_data.RayEncoding(run), on_progress=progress)
"""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run.toml"],
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Agents, and workers that are just starting, try for up to a minute to reach the cluster's head, which is gone.
    assert left_of(mark, late=("Agent", "agent", "worker.py")) == []
    assert json.loads((tmp_path / "there.partial" / "state.json").read_text())["mark"][1][0] == 3
    read_before = corpus / "1.jsonl"
    state, text = read_before.stat(), read_before.read_bytes()
    read_before.write_bytes(b"?" * state.st_size)
    os.utime(read_before, ns=(state.st_atime_ns, state.st_mtime_ns))
    prepare(run.model_copy(update={"launch": run.launch.model_copy(update={"address": address})}), console=_console())
    read_before.write_bytes(text)
    os.utime(read_before, ns=(state.st_atime_ns, state.st_mtime_ns))
    prepare(a_run(corpus, tmp_path / "here", data={"deduplicate": True}), console=_console())
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_the_command_starts_a_cluster_and_stops_it(corpus, tmp_path):
    run = a_run(corpus, tmp_path / "store", launch={"kind": "ray"})
    (tmp_path / "run.toml").write_text(run.to_toml())
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: mark}
    done = subprocess.run(
        [*MAIN, "prepare", tmp_path / "run.toml"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert f"store: {tmp_path / 'store'}" in done.stdout
    assert left_of(mark) == []


def test_bad_input_stops_it_where_asked(corpus, tmp_path, address):
    run = a_run(corpus, tmp_path / "store", data={"on_bad": "stop"}, launch={"kind": "ray", "address": address})
    with pytest.raises(UserError, match=r"0\.jsonl#7: invalid JSON"):
        prepare(run, console=_console())


def test_a_file_that_a_node_cant_open_is_named_with_the_node(tmp_path, ray):
    (tmp_path / "a.txt").write_text("a text")
    source = open_source(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").unlink()
    with (
        RayEncoding(a_run(tmp_path, tmp_path)) as encode,
        pytest.raises(UserError, match=r"a\.txt: can't be read: No such file.*on the node 1\d+\.\d+\.\d+\.\d+;.*s3://"),
    ):
        next(encode(source, None, Task("", None), ByteTokenizer(), 0))


def test_an_address_where_no_cluster_is_is_refused_at_once(corpus, tmp_path):
    run = a_run(corpus, tmp_path / "store", launch={"kind": "ray", "address": "127.0.0.1:9"})
    with pytest.raises(UserError, match=r"launch.address = '127.0.0.1:9': no Ray cluster answers there"):
        prepare(run, console=_console())


def test_documents_from_python_are_no_data_for_a_run_on_ray(corpus, tmp_path):
    with pytest.raises(UserError, match=r'launch.kind = "ray": reads what data.train names; leave out `source`'):
        train(a_run(corpus, tmp_path / "store", launch={"kind": "ray"}), source=Documents("a text"))


STREAM = {"stream": True, "validation": 0}


def numbered(folder: Path, name: str, documents: int, length: int) -> tuple[Path, set[str]]:
    """JSON lines in two files, each document `length` tokens with its end of text."""
    texts = [f"{name}{number}".ljust(length - 1, ".") for number in range(documents)]
    (folder / name).mkdir()
    for file in (0, 1):
        lines = [json.dumps({"text": text}) for text in texts[file::2]]
        (folder / name / f"{file}.jsonl").write_text("\n".join(lines))
    return folder / name, set(texts)


def streamed(ray, run: Run, start: int = 0, notes=None) -> list[list[str]]:
    """The inputs of each row of each batch, as text."""
    with StreamFeed(run) as feed:
        corpus = feed.corpus(lambda *report: None, print)
        data = feed.examples([[0, run.train.batch_size]], (notes if notes is not None else []).append)
        batches = list(data.batches(start))
    for batch in batches:
        assert batch.inputs_BT.dtype == batch.targets_BT.dtype == np.int32
        assert (batch.inputs_BT[:, 1:] == batch.targets_BT[:, :-1]).all() and (batch.weights_BT == 1).all()
    return [[corpus.tokenizer().decode(row) for row in batch.inputs_BT] for batch in batches]


def test_a_pass_of_the_stream_has_each_document_once(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_data, "GROUP_BYTES", 1)
    folder, texts = numbered(tmp_path, "a", 41, 16)
    with (folder / "1.jsonl").open("a") as file:
        file.write("\n{bad")
    notes: list[str] = []
    run = a_run(folder, tmp_path, data=STREAM, train={"sequence_length": 16, "batch_size": 4, "steps": 20})
    batches = streamed(ray, run, notes=notes)
    rows = [row for batch in batches for row in batch]
    first, second = rows[:40], rows[40:]  # the last document is left over: its end of text has no target
    assert len(set(first)) == len(set(second)) == 40 and set(first) < texts and set(second) < texts
    assert first != second and first != sorted(first)
    assert notes == [
        "a: 1 documents left out, the first 1.jsonl#21: invalid JSON (Expecting property name enclosed in "
        "double quotes, column 2)"
    ]
    assert streamed(ray, run) == batches
    gone_on = [row for batch in streamed(ray, run, start=10) for row in batch]
    assert len(gone_on) == 40 == len(set(gone_on)) and gone_on != first and gone_on != second


def test_several_sources_are_mixed_by_their_weights(ray, tmp_path):
    sources = [numbered(tmp_path, name, 30, 16)[0] for name in "ab"]
    listed = [{"source": str(sources[0]), "weight": 3.0}, {"source": str(sources[1])}]
    run = a_run(listed, tmp_path, data=STREAM, train={"sequence_length": 16, "batch_size": 4, "steps": 6})
    assert all(sorted(row[0] for row in batch) == ["a", "a", "a", "b"] for batch in streamed(ray, run))


@pytest.mark.slow
def test_it_trains_from_a_stream_evaluates_and_goes_on(address, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held-out.txt").write_text(" ".join(WORDS * 20))
    sections = {
        "data": {"stream": True, "validation": str(tmp_path / "held-out.txt")},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "launch": {"address": address},
        "run_dir": str(tmp_path / "run"),
    }
    steps = {"eval_every": 10, "batch_size": 8}
    run = a_run(corpus, tmp_path / "store", train={**steps, "steps": 30}, **sections)
    first = train(run, console=_console())
    more = train(run.model_copy(update={"train": run.train.model_copy(update={"steps": 40})}), console=_console())
    assert (first.step, more.step) == (30, 40)
    assert more.evaluation["val_loss"] < first.evaluation["val_loss"] < 5.2
    assert open_run(tmp_path / "run").evaluate() == pytest.approx(more.evaluation)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"validation": 0.1}, "data.validation = 0.1: under data.stream it must be a source of its own"),
        ("data", {"packing": "packed"}, 'data.packing = "packed": under data.stream it must be "stream"'),
        ("data", {"deduplicate": True}, "data.deduplicate = true: data.stream doesn't remember"),
        ("launch", {"kind": "processes", "workers": 2}, 'launch.kind = "processes": data.stream trains in one process'),
    ],
)
def test_what_a_stream_cant_do_is_refused(tmp_path, section, values, message):
    sections = {"data": STREAM}
    sections[section] = {**sections.get(section, {}), **values}
    with pytest.raises(UserError, match=message):
        a_run("python-stdlib", tmp_path, **sections)


def test_a_stream_is_neither_prepared_nor_made_of_a_store(corpus, tmp_path, ray):
    run = a_run(corpus, tmp_path / "store", data=STREAM)
    with pytest.raises(UserError, match=r"data.stream = true: has nothing to prepare"):
        prepare(run)
    with pytest.raises(UserError, match=r"leave out one of it and `source`"):
        train(run, source=Documents("a text"))
    prepare(a_run(corpus, tmp_path / "store"), console=_console())
    with pytest.raises(UserError, match=r"is prepared already; leave out data.stream"):
        train(a_run(tmp_path / "store", tmp_path / "other", data=STREAM), console=_console())
