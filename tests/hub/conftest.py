"""A real checkpoint, made once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for glass


@pytest.fixture(scope="session")
def glass(tmp_path_factory) -> Path:
    """The folder of a real Llama's checkpoint."""
    from glass import write_glass

    return write_glass(tmp_path_factory.mktemp("hub") / "glass")
