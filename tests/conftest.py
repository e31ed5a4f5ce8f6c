import os
import sys
import tempfile
from pathlib import Path

# Many tests build the same tiny programs, in this process and in others: compile each once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# On a machine that others use, PyTorch's threads wait for each other a hundred times as long as they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="meshwright-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# What is left of compiling is mostly LLVM's optimizer, and tiny programs run as fast without it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_unconfigure(config):
    import shutil

    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
