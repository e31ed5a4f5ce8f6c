"""Whether all workers see one run directory is found out by real processes that write and read."""

import os
import socket
from pathlib import Path

import pytest
from helpers import object_store
from processes import run_processes

from meshwright.errors import UserError
from meshwright.launch import shared_storage
from meshwright.launch.group import ALONE, Group
from meshwright.launch.shared_storage import check_same_store, check_seen, check_shared
from meshwright.storage.store import Store


def checked(group: Group, layouts: list[list[str]]) -> list[str]:
    shared_storage._PATIENCE_SECONDS = 0.5
    heard = []
    for folders in layouts:
        os.chdir(folders[group.rank])
        try:
            check_shared(Path("runs/x"), group)
            heard.append("")
        except UserError as error:
            heard.append(str(error))
    return heard


def test_three_workers(tmp_path):
    """One folder by several names, one that is apart, and one that can't be written to."""
    for name in ("a", "c", "d", "e"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/runs/x").mkdir(parents=True)
    (tmp_path / "a/runs/x/log.txt").write_text("words of yesterday")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "e/runs").write_text("a file")
    layouts = [[str(tmp_path / name) for name in names] for names in ("aba", "cdc", "cec")]
    first, *others = run_processes(checked, workers=3, arguments=(layouts,))
    assert others == [first, first]
    well, apart, unwritable = first
    host = socket.gethostname()
    assert well == ""
    assert [path.name for path in (tmp_path / "a/runs/x").iterdir()] == ["log.txt"]
    assert apart == (
        f"run_dir = 'runs/x': isn't one folder for all: that of worker 0 ({host}), {tmp_path}/c/runs/x, isn't seen by "
        f"worker 1 ({host}) at {tmp_path}/d/runs/x; give a folder on storage that all machines share, by the same "
        "path, or an object store (s3://bucket/path, gs://bucket/path)"
    )
    assert not (tmp_path / "d/runs/x").exists()
    assert unwritable == (
        f"run_dir = 'runs/x': can't be written to by worker 1 ({host}) at {tmp_path}/e/runs/x: Not a directory"
    )
    assert not list((tmp_path / "c/runs/x").glob(".*"))


def checked_stores(group: Group, layouts: list[list[str]], denied: int) -> list[str]:
    stores = [Store(urls[group.rank]) for urls in layouts]
    heard = [of_store(store, group) for store in stores]
    if group.rank == denied:
        stores[0].write = no_writing
    return [*heard, of_store(stores[0], group)]


def no_writing(name: str, content: bytes) -> None:
    raise PermissionError("Access Denied")


def of_store(store: Store, group: Group) -> str:
    try:
        check_same_store(store, group)
    except UserError as error:
        return str(error)
    return ""


def test_three_workers_of_an_object_store(monkeypatch):
    """One place for all, one that is apart, and one that may not be written to."""
    import boto3

    here, there = "s3://runs/x", "s3://elsewhere/x"
    with object_store() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for bucket in ("runs", "elsewhere"):
            boto3.client("s3").create_bucket(Bucket=bucket)
        layouts = [[here, here, here], [here, there, here]]
        first, second, third = run_processes(checked_stores, workers=3, arguments=(layouts, 2))
        assert [Store(url).names() for url in (here, there)] == [[], []]
    host = socket.gethostname()
    apart = (
        f": isn't one place for all: that of worker 0 ({host}) isn't seen by worker 1 ({host}); see that the "
        "environment of each has the same endpoint and account"
    )
    unwritable = (
        f"run_dir = {here!r}: can't be written to by worker 2 ({host}): Access Denied; give it credentials with which "
        "it may write"
    )
    assert first == third == ["", f"run_dir = {here!r}{apart}", unwritable]
    assert second == ["", f"run_dir = {there!r}{apart}", unwritable]


def test_alone_there_is_nothing_to_check(tmp_path):
    check_shared(tmp_path / "not made", ALONE)
    assert not list(tmp_path.iterdir())


def test_a_single_worker_elsewhere_does_not_see_the_driver_s_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_storage, "_PATIENCE_SECONDS", 0.1)
    (tmp_path / "mark").touch()
    check_seen(tmp_path / "mark", ALONE)
    with pytest.raises(UserError, match=r"run_dir = .*: the driver's isn't seen by worker 0 \(.*\); give a folder on"):
        check_seen(tmp_path / "elsewhere" / "mark", ALONE)
