"""Runs the cases of the parity matrix in processes of their own."""

import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import jobs
import numpy as np
from cases import FAMILIES, ONE, Layout, cases
from processes import run_processes

WAIT = 1500.0  # a test waits for its case, and the first for all that come before
AT_A_TIME = 2


class Matrix:
    """The results of cases, worked out in the background, some at a time.

    Arguments:
        folder: where results go; those already there are taken as they are.
        wanted: family, layout's name and accumulation of each case; one device, against which all are compared, comes
            with each family.
    """

    def __init__(self, folder: Path, wanted: set[tuple[str, str, int]]):
        self._folder = folder
        self._jobs: queue.Queue = queue.Queue()
        self._failures: list[str] = []
        self._closing = False
        self._running: set[subprocess.Popen] = set()
        for family in FAMILIES:
            groups = defaultdict(list)
            for layout, accumulate in cases(family):
                path = jobs.file_of(folder / family, layout, accumulate)
                if (family, layout.name, accumulate) in wanted and not path.exists():
                    groups[layout.processes, layout.devices].append(f"{layout.name}/{accumulate}")
            if not jobs.file_of(folder / family, ONE, 1).exists():
                self._jobs.put((family, 1, 1, ["one device/1"]))
            for (processes, devices), names in sorted(groups.items()):
                self._jobs.put((family, processes, devices, names))
        self._threads = [threading.Thread(target=self._work) for _ in range(AT_A_TIME)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._closing:
            try:
                family, processes, devices, names = self._jobs.get_nowait()
            except queue.Empty:
                return
            folder = self._folder / family
            folder.mkdir(parents=True, exist_ok=True)
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
