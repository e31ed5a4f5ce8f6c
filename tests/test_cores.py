"""How many processors a process may use, where a machine has more."""

import os

import pytest

from meshwright import cores


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "800000 100000\n"}, 6),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_what_affinity_and_a_container_leave(cgroups, files, expected):
    (cgroups / "cpu").mkdir()
    for name, text in files.items():
        (cgroups / name).write_text(text)
    assert cores.core_count() == expected


def test_a_system_without_affinity(cgroups, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.core_count() == 64
