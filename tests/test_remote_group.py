"""Processes that reach an object store each by its own environment: it must be one, and have what all have written."""

import os

import pytest
from helpers import object_store
from processes import run_processes

from meshwright.errors import UserError
from meshwright.launch.group import Group
from meshwright.storage.mirror import Mirror
from meshwright.storage.store import Store

URL, ELSEWHERE, STEP = "s3://runs/some/tiny", "s3://elsewhere/some/tiny", "step_00000004"


@pytest.fixture(autouse=True)
def server(monkeypatch):
    import boto3

    with object_store() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for bucket in ("runs", "elsewhere"):
            boto3.client("s3").create_bucket(Bucket=bucket)
        yield


def begun(group: Group, caches: str, urls: list[str]) -> str:
    os.environ["XDG_CACHE_HOME"] = f"{caches}/{group.rank}"
    try:
        with Mirror(urls[group.rank], group):
            return ""
    except UserError as error:
        return str(error).partition(": ")[2].partition(":")[0]


def test_stores_that_differ_are_found_out_before_training(tmp_path):
    assert run_processes(begun, arguments=(str(tmp_path), [URL, URL])) == ["", ""]
    assert run_processes(begun, arguments=(str(tmp_path), [URL, ELSEWHERE])) == ["isn't one place for all"] * 2
    assert [Store(url).names() for url in (URL, ELSEWHERE)] == [[], []]


def uploaded(group: Group, caches: str, lost: str) -> list[str] | str:
    os.environ["XDG_CACHE_HOME"] = f"{caches}/{group.rank}"
    with Mirror(URL, group) as mirror:
        write = mirror.store.write
        mirror.store.write = lambda name, content: None if name.endswith(lost) else write(name, content)
        partial = mirror.partial(STEP)
        partial.mkdir(parents=True)
        (partial / f"of_{group.rank}").write_text("shards")
        try:
            return sorted(mirror.upload(partial, STEP))
        except UserError as error:
            return str(error)


def test_a_checkpoint_of_which_a_part_is_missing_is_not_committed(tmp_path):
    whole, _ = run_processes(uploaded, arguments=(str(tmp_path / "a"), "nothing"))
    assert whole == ["of_0", "of_1"]
    told, theirs = run_processes(uploaded, arguments=(str(tmp_path / "b"), "parts/1.json"))
    assert theirs == ["of_1"]
    assert told == (
        f"{URL}/checkpoints/{STEP}/parts/1.json: was written by worker 1, and isn't there; the checkpoint isn't "
        "committed; see that all workers reach the same store, and that nothing else removes objects from it"
    )
