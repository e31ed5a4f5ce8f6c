"""What every benchmark needs: facts of the machine, and a place for results."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine(*packages: str) -> dict[str, Any]:
    """What figures were measured on: processor, cores, load, system, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def card() -> str:
    """The card, asked for in a process that goes away again and gives its memory back."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1]


def write_results(name: str, measured_on: dict[str, Any], figures: dict[str, Any]) -> Path:
    """Write `results/<name>.json`: the command, the machine, the figures."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "machine": measured_on, **figures}, indent=1) + "\n")
    return path
