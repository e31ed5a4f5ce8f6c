import os
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BLOCK = 200 * 2**20
CODE = rf"""
import re, resource, sys
from pathlib import Path
from meshwright.engines.jax.memory import keep_freed_memory
import ctypes
done = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults, huge = [], 0
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc({BLOCK})
    ctypes.memset(block, 1, {BLOCK})
    huge = int(re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(done, faults[-1], huge)
"""


def third_time(**environment) -> tuple[str, int, int]:
    """Of a large block that is taken for the third time: whether memory is kept, page faults, bytes in huge pages."""
    env = {**os.environ, "MESHWRIGHT_MALLOC": "", **environment}
    done, faults, huge = subprocess.check_output([sys.executable, "-c", CODE], text=True, env=env, timeout=60).split()
    return done, int(faults), int(huge)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_kept():
    kept, left_alone = third_time(), third_time(MESHWRIGHT_MALLOC="default")
    assert (kept[0], left_alone[0]) == ("True", "False")
    assert left_alone[1] > 100
    assert kept[1] < left_alone[1] / 20


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="huge pages for those who ask for them"
)
def test_it_lies_in_huge_pages():
    assert third_time()[2] > BLOCK / 2 > third_time(MESHWRIGHT_MALLOC="default")[2]
