"""Which documents have come before: a table on disk, so that memory stays flat whatever the corpus."""

import errno
import sqlite3
from pathlib import Path

# Of the table, what SQLite may hold in memory, in KiB.
CACHE_KIB = 64 << 10


class Seen:
    """The digests of the documents so far, safe on disk up to the last commit.

    Arguments:
        path: the table's file; made if it isn't there.
        commit: the number of the last commit that counts; what was added after it is forgotten.
    """

    def __init__(self, path: Path, commit: int) -> None:
        self._commit = commit
        # Transactions begin and end where this class says; the folder's lock keeps other processes out.
        self._table = sqlite3.connect(path, isolation_level=None)
        self._table.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._table.execute("PRAGMA synchronous = FULL")
        self._table.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._table.execute(
            "CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY, after_commit INTEGER) WITHOUT ROWID"
        )
        # The table is committed before the state that names the commit, so it may be one ahead.
        self._table.execute("DELETE FROM seen WHERE after_commit >= ?", (commit,))
        self._table.execute("BEGIN")

    def add(self, digest: bytes) -> bool:
        """Note a digest.

        Returns:
            Whether it is new.

        Raises:
            OSError: the disk is full.
        """
        try:
            row = (digest, self._commit)
            return self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount == 1
        except sqlite3.OperationalError as error:
            raise _as_os_error(error) from None

    def commit(self) -> None:
        """Have all so far safe on disk; the commit's number is one more than the last one's."""
        try:
            self._table.execute("COMMIT")
            self._commit += 1
            self._table.execute("BEGIN")
        except sqlite3.OperationalError as error:
            raise _as_os_error(error) from None

    def close(self) -> None:
        """Close the file; what wasn't committed is dropped."""
        self._table.close()


def _as_os_error(error: sqlite3.OperationalError) -> Exception:
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, "no space left on the disk")
    return error
