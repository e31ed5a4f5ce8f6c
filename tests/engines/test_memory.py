import subprocess
import sys

import pytest

CODE = """
import resource, sys
from meshwright.engines.jax.memory import keep_freed_memory
import ctypes
done = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(200 << 20)
    ctypes.memset(block, 1, 200 << 20)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(done, faults[-1])
"""


def faults(**environment) -> tuple[str, int]:
    """Whether it was done, and the page faults of a large block that is taken for the third time."""
    import os

    env = {**os.environ, "MESHWRIGHT_MALLOC": "", **environment}
    done, count = subprocess.check_output([sys.executable, "-c", CODE], text=True, env=env, timeout=60).split()
    return done, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_kept():
    kept, left_alone = faults(), faults(MESHWRIGHT_MALLOC="default")
    assert (kept[0], left_alone[0]) == ("True", "False")
    assert left_alone[1] > 100
    assert kept[1] < left_alone[1] / 20
