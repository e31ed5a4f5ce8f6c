"""Two GPUs of one host under Ray: a worker for each, and one worker for both, on every mesh, against one GPU.

    python benchmarks/gpu_ray.py            writes results/gpu_ray.json

The command `meshwright train` itself, ten steps of a small GPT-2 in two micro-batches a step, from the same run file,
with `train.deterministic`. In float32 (matrix products at full float32 precision) losses must agree with those of one
GPU to 1e-5; in bfloat16 to 1e-2. Before them a run loses a worker by SIGKILL and must end with the losses of the one
that wasn't touched, bit for bit. Runs go side by side, so their times say nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, write_results

MAIN = [sys.executable, "-c", "from meshwright.cli import main; main(prog_name='meshwright')"]
AXES = ["data", "fsdp", "tensor", "pipeline"]
PLACES = {"two workers": ["launch.workers=2", "launch.devices_per_worker=1"]}
PLACES["one worker"] = ["launch.workers=1", "launch.devices_per_worker=2"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
STEPS, KILLED_STEPS, SAVED = 10, 200, 20
PAIR_LIMIT, LIMIT = 100.0, 300.0  # seconds for the two, and for all others together
RUN = f"""
[data]
train = "texts/*.txt"
store = "store"
validation = 0.0
[tokenizer]
kind = "bytes"
[model]
preset = "gpt2-tiny"
dropout = 0.0
[train]
steps = {STEPS}
batch_size = 16
micro_batch_size = 8
sequence_length = 128
deterministic = true
log_every = 1
eval_every = 0
sample_every = 0
[checkpoint]
every = 0
"""


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen:
    """The command, with its output in a file beside the run."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    with (folder / f"{name}.out").open("wb") as out:
        command = [*MAIN, "train", "run.toml", f"name={name}", *overrides]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)


def losses(folder: Path, name: str) -> list[float]:
    """By step, of a run that has ended or still goes."""
    path = folder / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [loss for _, loss in sorted({one["step"]: one["loss"] for one in records if "loss" in one}.items())]


def end_of(process: subprocess.Popen, end: float) -> int:
    """The exit code of a command, which is ended where the time is over."""
    try:
        return process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.terminate()
        return -int(signal.SIGTERM)


def kill_a_worker(folder: Path, name: str, process: subprocess.Popen, end: float) -> int | None:
    """SIGKILL worker 1 once there is a checkpoint.

    Returns:
        The step that had been logged by then; None: there was no checkpoint in time.
    """
    directory = folder / "runs" / name
    while not any(directory.glob("checkpoints/step_*/manifest.json")):
        if process.poll() is not None or time.monotonic() > end:
            return None
        time.sleep(0.05)
    log = (directory / "workers" / "worker_1.log").read_text()
    step = len(losses(folder, name))
    os.kill(int(re.findall(r"process (\d+)$", log, re.MULTILINE)[-1]), signal.SIGKILL)
    return step


def compare(name: str, dtype: str, got: list[float], one: list[float], code: int) -> dict[str, Any]:
    """How far a run is from one GPU's."""
    whole = code == 0 and len(got) == len(one)
    away = max(abs(a - b) for a, b in zip(got, one, strict=True)) if whole else None
    agrees = away is not None and away <= TOLERANCE[dtype]
    return {"run": name, "dtype": dtype, "exit_code": code, "largest_difference": away, "agrees": agrees}


def kill_and_compare(folder: Path) -> dict[str, Any]:
    """What came of a run that lost a worker, beside one that didn't."""
    end = time.monotonic() + PAIR_LIMIT
    ways = ["launch.kind=ray", *PLACES["two workers"], "mesh.fsdp=2", "mesh.data=1", "train.compute_dtype=float32"]
    ways += [f"train.steps={KILLED_STEPS}", f"checkpoint.every={SAVED}"]
    pair = {name: start(folder, name, *ways) for name in ("unbroken", "killed")}
    at = kill_a_worker(folder, "killed", pair["killed"], end)
    codes = [end_of(process, end) for process in pair.values()]
    whole, broken = (losses(folder, name) for name in pair)
    log = folder / "runs" / "killed" / "log.txt"
    starts = log.read_text().count("  engine ") if log.exists() else 0
    for name in pair:
        print(f"--- {name}", (folder / f"{name}.out").read_text(errors="replace")[-1500:], sep="\n", flush=True)
    found = {"killed_after_step": at, "starts": starts, "exit_codes": codes, "steps": len(broken)}
    away = [step for step, (a, b) in enumerate(zip(whole, broken, strict=False), 1) if a != b]
    found |= {"first_step_that_differs": away[0] if away else None}
    return found | {"bit_for_bit": len(whole) == len(broken) == KILLED_STEPS and not away}


def compare_meshes(folder: Path) -> list[dict[str, Any]]:
    """How far each mesh is from one GPU, in both places."""
    end = time.monotonic() + LIMIT
    one = {dtype: f"one-{dtype}" for dtype in TOLERANCE}
    runs: dict[str, tuple[str, subprocess.Popen]] = {}
    for dtype, name in one.items():
        overrides = ["launch.devices_per_worker=1", f"train.compute_dtype={dtype}"]
        runs[name] = (dtype, start(folder, name, *overrides))
    for place, workers in PLACES.items():
        for dtype in TOLERANCE:
            for axis in AXES:
                name = f"{place}-{axis}-2-{dtype}".replace(" ", "-")
                mesh = [f"mesh.{axis}=2", *(["mesh.data=1"] if axis != "data" else [])]
                ways = [*mesh, *workers, "launch.kind=ray", f"train.compute_dtype={dtype}"]
                runs[name] = (dtype, start(folder, name, *ways))
    rows = []
    codes = {name: end_of(process, end) for name, (_, process) in runs.items()}
    for name, (dtype, _) in runs.items():
        rows.append(compare(name, dtype, losses(folder, name), losses(folder, one[dtype]), codes[name]))
        print(json.dumps(rows[-1]), flush=True)
        if not rows[-1]["agrees"]:
            print(f"--- {name}", (folder / f"{name}.out").read_text(errors="replace")[-1500:], sep="\n", flush=True)
    return rows


def main() -> None:
    """Measure, and write each part when it is there."""
    measured_on = machine("jax", "ray")
    cards = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    measured_on["cards"] = cards.stdout.split("\n")[:-1]
    with tempfile.TemporaryDirectory(prefix="meshwright-gpu-ray-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "texts").mkdir()
        for source in sorted(Path(os.__file__).parent.glob("*.py"))[:40]:
            (folder / "texts" / f"{source.stem}.txt").write_bytes(source.read_bytes())
        (folder / "run.toml").write_text(RUN)
        subprocess.run([*MAIN, "prepare", "run.toml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = {"worker_killed": kill_and_compare(folder)}
        print(json.dumps(figures), flush=True)
        write_results("gpu_ray", measured_on, figures)
        figures |= {"tolerance": TOLERANCE, "runs": compare_meshes(folder)}
        print(write_results("gpu_ray", measured_on, figures))


if __name__ == "__main__":
    main()
