"""Saved on one mesh, gone on from on another: losses as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import restore_jobs
from processes import run_processes


def alone(folder: Path, devices: int, *actions: str) -> dict[str, list[float]]:
    command = [sys.executable, restore_jobs.__file__, str(folder), str(devices), *actions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(actions, json.loads(done.stdout.splitlines()[-1]), strict=True))


def together(folder: Path, *actions: str) -> dict[str, list[float]]:
    act, arguments = restore_jobs.act_as_one_of_several, (str(folder), actions)
    results = run_processes(act, workers=2, devices_per_worker=4, timeout=600, arguments=arguments)
    assert results[0] == results[1]
    return dict(zip(actions, results[0], strict=True))


@pytest.mark.timeout(1500)
def test_every_mesh_takes_up_what_another_left(tmp_path):
    unbroken = alone(tmp_path, 1, "save:one", "one>one")
    expected_first, expected_rest = unbroken.values()
    found = alone(tmp_path, 8, "save:fsdp", "save:stages", "save:circular", "one>stages", "fsdp>circular")
    found |= alone(tmp_path, 8, "circular>context", "circular>fsdp", "stages>expert")
    found |= alone(tmp_path, 1, "stages>one", "circular>one")
    found |= together(tmp_path, "save:two", "circular>two", "two>two")
    found |= alone(tmp_path, 8, "two>stages", "two>circular")
    for action, losses in found.items():
        expected = expected_first if action.startswith("save:") else expected_rest
        assert losses == pytest.approx(expected, rel=1e-5), action
    assert len(set(expected_first + expected_rest)) == 5
    assert list((tmp_path / "two" / "state").rglob("ocdbt.process_1")), "the second process wrote nothing of its own"
