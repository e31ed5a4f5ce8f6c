"""A command, run and watched from outside: how long it takes, how much memory and how much disk."""

import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# Seconds between two looks. One takes a few milliseconds, so the looking stays below a hundredth of the work.
INTERVAL = 0.2


def watch(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command to its end.

    Arguments:
        command: what to run.
        folder: where it writes.
        environment: variables to set for it.

    Returns:
        `printed`, all that it wrote; `seconds` from its start to its end; `cpu_seconds` of its processes together; and
        the highest that was seen of `peak_mb`, the memory of all its processes, pages that they share counted once, of
        `peak_own_mb`, of that what isn't of mapped files, and of `disk_mb`, what lies in the folder.

    Raises:
        RuntimeError: the command failed; with what it printed.
    """
    peaks = {"peak_mb": 0.0, "peak_own_mb": 0.0, "disk_mb": 0.0}
    done = threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})}
    )

    def look() -> None:
        while not done.wait(INTERVAL):
            seen = {**_memory(process.pid), "disk_mb": _disk(folder)}
            peaks.update({name: max(value, seen[name]) for name, value in peaks.items()})

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        done.set()
        looking.join()
        if process.returncode is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    peaks["disk_mb"] = max(peaks["disk_mb"], _disk(folder))
    return {"printed": printed, "seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, **peaks}


def _memory(pid: int) -> dict[str, float]:
    pages = {"Pss": 0, "Pss_Anon": 0}
    with suppress(psutil.Error, OSError):
        for process in (one := psutil.Process(pid), *one.children(recursive=True)):
            with suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in pages:
                        pages[name] += int(value.split()[0])
    return {"peak_mb": pages["Pss"] * 1024 / 1e6, "peak_own_mb": pages["Pss_Anon"] * 1024 / 1e6}


def _disk(folder: Path) -> float:
    blocks = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(path, name)).st_blocks
    return blocks * 512 / 1e6
