"""The first promise: the mesh never changes the training. Every model on every layout, against one device."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import jobs
from cases import BATCH, BY_NAME, FAMILIES, ONE, STEPS, TIME, Layout, cases
from compare import EXEMPT, compare
from processes import run_processes

WAIT = 1500.0  # a test waits for its case, and the first for all that come before
ALL = [(family, layout, accumulate) for family in FAMILIES for layout, accumulate in cases(family)]


class Matrix:
    """Runs the cases in processes of their own, as many at a time as there are cores for, in the order of the tests."""

    def __init__(self, folder: Path, wanted: set[tuple[str, str, int]]):
        self._folder = folder
        self._jobs: queue.Queue = queue.Queue()
        self._failures: list[str] = []
        self._closing = False
        self._running: set[subprocess.Popen] = set()
        for family in FAMILIES:
            groups = defaultdict(list)
            for layout, accumulate in cases(family):
                if (family, layout.name, accumulate) in wanted:
                    groups[layout.processes, layout.devices].append(f"{layout.name}/{accumulate}")
            if groups:
                self._jobs.put((family, 1, 1, ["one device/1"]))
            for (processes, devices), names in sorted(groups.items()):
                self._jobs.put((family, processes, devices, names))
        self._threads = [threading.Thread(target=self._work) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._closing:
            try:
                family, processes, devices, names = self._jobs.get_nowait()
            except queue.Empty:
                return
            folder = self._folder / family
            folder.mkdir(exist_ok=True)
            try:
                if processes > 1:
                    run_processes(
                        jobs.train_as_one_of_several,
                        workers=processes,
                        devices_per_worker=devices // processes,
                        timeout=WAIT,
                        arguments=(family, str(folder), names),
                    )
                else:
                    self._run([sys.executable, jobs.__file__, family, str(folder), str(devices), *names])
            except Exception as error:
                self._failures.append(f"{family}, {names}: {error}")

    def _run(self, command: list[str]) -> None:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            self._running.add(process)
            output = process.communicate()[0]
            self._running.discard(process)
        if process.returncode and not self._closing:
            raise AssertionError(f"exit code {process.returncode}: {output[-4000:]}")

    def result(self, family: str, layout: Layout, accumulate: int) -> dict[str, np.ndarray]:
        """What came out of a case; waits for it."""
        path = jobs.file_of(self._folder / family, layout, accumulate)
        end = time.monotonic() + WAIT
        while not path.exists():
            assert not self._failures, "\n".join(self._failures)
            assert time.monotonic() < end, f"{path.name}: took more than {WAIT} s"
            time.sleep(0.1)
        with np.load(path) as arrays:
            return dict(arrays)

    def close(self) -> None:
        self._closing = True
        for process in list(self._running):
            process.kill()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def matrix(request):
    wanted = {
        (item.callspec.params["family"], item.callspec.params["layout"].name, item.callspec.params["accumulate"])
        for item in request.session.items
        if item.name.startswith("test_same_training") and hasattr(item, "callspec")
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-parity-") as folder:
        matrix = Matrix(Path(folder), wanted)
        yield matrix
        matrix.close()


def _name(value: object) -> str:
    return value.name.replace(" ", "_") if isinstance(value, Layout) else str(value)


@pytest.mark.timeout(WAIT)
@pytest.mark.parametrize(("family", "layout", "accumulate"), ALL, ids=_name)
def test_same_training(matrix, family, layout, accumulate):
    one, many = matrix.result(family, ONE, 1), matrix.result(family, layout, accumulate)
    row = compare(one, many)
    assert row["loss"] < 1e-5, row
    assert row["eval"] < 1e-5, row
    assert row["initial"] < 1e-6, row
    assert row["gradient"] < 1e-4, row
    assert row["gradient_cosine"] > 0.99999, row
    assert row["param"] < 1e-4, row
    assert row["param_cosine"] > 0.99999, row
    facts = json.loads(str(many["layout"]))
    assert not facts["replicas differ"]
    assert_layouts_differ(layout, facts)
    assert facts["processes"] == layout.processes


def assert_layouts_differ(layout: Layout, facts: dict) -> None:
    """That the mesh cut what it is there to cut."""
    mesh, cut = layout.mesh, {}
    for name, shape in facts["shapes"].items():
        cut[name] = [whole // part for whole, part in zip(shape, facts["shards"][name], strict=True)]
    shares = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    assert facts["batch"] == [1, BATCH // shares, TIME // mesh.get("context", 1)]
    out = next(name for name in cut if name.startswith("blocks.attention.out.kernel"))
    assert cut[out] == [mesh.get("pipeline", 1), mesh.get("tensor", 1), mesh.get("fsdp", 1)]
    if "expert" in mesh:
        assert cut["blocks.mlp.up"][1] == mesh["expert"]
    if "tensor" in mesh:
        assert cut["embedding"][0] == mesh["tensor"]
        assert facts["shapes"]["embedding"][0] > 61  # padded, and never seen outside


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(WAIT)
def test_every_parameter_has_a_gradient(matrix, family):
    one = matrix.result(family, ONE, 1)
    norms = {name: np.linalg.norm(value) for name, value in one.items() if name.startswith("1/gradient")}
    assert len(norms) > 10
    for name, norm in norms.items():
        assert norm > 0 or name.endswith(EXEMPT), name


def test_a_difference_is_seen(matrix):
    """The comparison itself: another seed of the data, a factor of two, a swapped tensor."""
    one = matrix.result("llama", ONE, 1)
    scaled = {name: value * 1.001 if "/gradient/" in name else value for name, value in one.items()}
    assert compare(one, scaled)["gradient"] > 1e-4
    swapped = {**one, "3/gradient/blocks.mlp.up.kernel": one["3/gradient/blocks.mlp.gate.kernel"]}
    assert compare(one, swapped)["gradient_cosine"] < 0.99
    assert BY_NAME["data 8"].devices == 8
    assert STEPS == 5
