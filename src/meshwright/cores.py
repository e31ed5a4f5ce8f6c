"""How many processors a process may use."""

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # of version 2, and of version 1


def core_count() -> int:
    """Cores that this process may use, of those of the machine: what Slurm, `taskset` or a container leave it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _quota())))


def _quota() -> float:
    for names in _QUOTAS:
        with suppress(OSError, ValueError):
            time, period = " ".join((_CGROUPS / name).read_text() for name in names).split()
            return math.inf if time in ("max", "-1") else int(time) / int(period)
    return math.inf
