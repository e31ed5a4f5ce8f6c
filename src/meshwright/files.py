"""Files that outlive a crash, and the one that marks a run directory."""

import os
from pathlib import Path

LOCK = ".lock"
"""In a run directory: the process that trains there holds a lock on it."""
LOCK_TEXT = "A run directory of Meshwright; the process that trains here holds a lock on this file.\n"


def is_run_directory(folder: Path) -> bool:
    """Whether a run trains, or has trained, in a folder."""
    try:
        return (folder / LOCK).read_bytes() == LOCK_TEXT.encode()
    except OSError:
        return False


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
