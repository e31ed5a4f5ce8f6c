import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from snapshots import FOLDER, snapshots


def test_layouts_are_as_written_down():
    """After a wanted change: python tests/parity/snapshots.py, and read the diff."""
    written = {path.name: path.read_text() for path in FOLDER.glob("*.txt")}
    assert snapshots() == written
    assert len(written) == 6
    assert len(set(written.values())) == 6
