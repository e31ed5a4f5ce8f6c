"""Keep the memory of a CPU step from one step to the next.

XLA's CPU backend takes the temporary memory of a program from `malloc` at each call and frees it after. glibc hands
large blocks back to the kernel at once, so each step would fault in and zero the same pages again, which is up to a
third of a small model's step. Told to keep what was freed, and to use large pages, it doesn't.
"""

import ctypes
import os

from meshwright.launch.devices import on_cpu

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # <malloc.h>
_MADV_HUGEPAGE = 14  # <sys/mman.h>
_HUGE_PAGE = 2 * 2**20
_POOL_BYTES = 2 * 2**30


def keep_freed_memory() -> bool:
    """Have this process keep the memory it frees; call it before JAX starts its threads.

    Address space for a pool is advised to use huge pages; no memory is taken before it is used. The resident size
    then stays at its peak. Nothing is done where JAX has an accelerator to use, nor with `MESHWRIGHT_MALLOC=default` in
    the environment.

    Returns:
        Whether it was done: only glibc (Linux) can.
    """
    if os.environ.get("MESHWRIGHT_MALLOC") == "default" or not on_cpu():
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
        libc.gnu_get_libc_version  # noqa: B018  (musl has a mallopt that does nothing)
    except (AttributeError, OSError, TypeError):
        return False
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes, madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # -1: never. The largest threshold of an int is less than the pool, which would go back to the kernel when freed.
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
        mallopt(option, value)
    pool = malloc(_POOL_BYTES)
    if pool:
        start = -(-pool // _HUGE_PAGE) * _HUGE_PAGE
        madvise(start, (pool + _POOL_BYTES - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        free(pool)
    return True
