"""Prepare a run over and over, killed by SIGKILL at a chosen moment, then again to its end: a program for the tests.

    python killed_prepare.py RUN.toml '{"processes": 1, "points": 40, "seed": 0}'

A moment is a call that makes something safe on disk, names or removes a file, or appends to a split. Each attempt is a
forked process, so that a hundred of them take seconds. Prints, as JSON, how many moments an unbroken run has and the
points at which what came out differed from the unbroken run's.
"""

import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

from prepared import contents

from meshwright.config import Run, load_run
from meshwright.data import duplicates, encode, make, workers, writer
from meshwright.data.prepare import prepare

moments = 0


def kill_at(point: int) -> None:
    """Have this process killed at its so-manieth moment; 0: never."""

    def counted(call):
        def wrapper(*arguments, **keywords):
            global moments
            moments += 1
            if moments == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return wrapper

    # A killed process, unlike a power cut, takes nothing from the system's memory, so the disk needn't be waited for.
    os.fsync = counted(lambda handle: None)
    for place, name in (
        (os, "replace"),
        (os, "rename"),
        (Path, "unlink"),
        (writer.SplitWriter, "append"),
        (duplicates.Seen, "commit"),
    ):
        setattr(place, name, counted(getattr(place, name)))


def attempt(run: Run, point: int, log: Path) -> int:
    """Prepare in a forked process.

    Returns:
        Its moments; -9: it was killed.
    """
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -9):
            raise SystemExit(f"attempt {point} failed:\n{log.read_text()}")
        return status or int(log.read_text())
    try:
        kill_at(point)
        prepare(run)
        log.write_text(str(moments))
        os._exit(0)
    except BaseException:
        log.write_text(traceback.format_exc())
        os._exit(1)


def main(run_file: str, options: str) -> None:
    """See above."""
    wanted = json.loads(options)
    run = load_run(run_file)
    store, partial = Path(run.data.store), Path(f"{run.data.store}.partial")
    log = Path(run_file).with_suffix(".log")
    encode.BLOCK_CHARACTERS, make.COMMIT_BYTES, writer.SHARD_TOKENS = 2000, 6000, 7000
    workers.ALONE_CHARACTERS = 0
    total = attempt(run, 0, log)
    unbroken = contents(store)
    shutil.rmtree(store)
    choose = random.Random(wanted["seed"])
    ends = [*range(1, 6), *range(total - 9, total + 1)]
    points = sorted({*ends, *(choose.randint(1, total) for _ in range(max(0, wanted["points"] - len(ends))))})
    if wanted["points"] < len(ends):
        points = sorted(choose.sample(range(1, total + 1), wanted["points"]))
    wrong: list[int] = []
    gone_on = 0
    for point in points:
        killed = attempt(run, point, log) == -9
        gone_on += (partial / "state.json").exists()
        attempt(run, 0, log)
        if not killed or contents(store) != unbroken or partial.exists():
            wrong.append(point)
        shutil.rmtree(store)
    print(json.dumps({"moments": total, "points": len(points), "gone_on": gone_on, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
