"""Files that outlive a crash."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have what was written to a file, or the entries of a folder, safe on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole: at any moment either the old content is there or the new one, safe on disk."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)
