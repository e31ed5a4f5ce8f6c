"""How long a command takes to say what it does.

    python benchmarks/start.py

Each command runs ten times as a process of its own; the aim is a median under 0.3 s for `meshwright --help`.
"""

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import machine, write_results

COMMANDS = ["--help", "train --help", "prepare --help", "report --help"]
REPEATS = 10


def seconds(arguments: str) -> float:
    """One run of the command."""
    program = shutil.which("meshwright", path=Path(sys.executable).parent)
    assert program, "install the package first: pip install -e ."
    start = time.perf_counter()
    subprocess.run([program, *arguments.split()], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, write the results, print them."""
    measured_on, figures = machine("click"), {}
    for command in COMMANDS:
        times = [seconds(command) for _ in range(REPEATS + 1)][1:]
        figures[f"meshwright {command}"] = {"median_s": statistics.median(times), "max_s": max(times)}
        print(f"meshwright {command:<16} {statistics.median(times):.3f} s")
    print(write_results("start", measured_on, {"repeats": REPEATS, "commands": figures}))


if __name__ == "__main__":
    main()
