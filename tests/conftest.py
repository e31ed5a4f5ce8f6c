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
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from helpers import QUICK, write_corpus

os.environ.setdefault("XLA_FLAGS", QUICK)


def pytest_itemcollected(item):
    """Each file in one process, where tests run side by side; Ray clusters in one, since they share ports."""
    item.add_marker(pytest.mark.xdist_group("ray" if _has_clusters(item) else item.nodeid.partition("::")[0]))


def pytest_collection_modifyitems(items):
    """Ray clusters first: they take the longest."""
    items.sort(key=lambda item: not _has_clusters(item))


def _has_clusters(item):
    return item.path.name.startswith("test_ray_")


@pytest.fixture
def in_folder_with_texts(tmp_path, monkeypatch):
    """Where the runs of `tiny_runs` find what they train on."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "texts")


def pytest_unconfigure(config):
    import shutil

    if not hasattr(config, "workerinput"):  # the processes share it
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
