"""The 3-D run: a mixture of experts with latent attention on several meshes of eight GPUs (or four, or two).

    python benchmarks/gpu_eight.py              writes results/gpu_eight.json; ends with 1 where something is off
    python benchmarks/gpu_eight.py --tiny 8     the same code and tiny models, on eight virtual devices of a CPU;
                                                writes gpu_eight_tiny.json in the folder for temporary files

(a) A model of one billion parameters (`deepseek-1b`: 8 experts, of which a token passes 2, and one for all) takes 100
steps in bfloat16 on each mesh and on one device, from one seed, on the same bytes of Python's standard library.
(b) `llama-1b`, 2,048 tokens a sequence, on `fsdp` of 1, 2, 4 and 8, 8 sequences a device: weak scaling.
(c) Half-way, (a) on `fsdp` is saved, and goes on; another process restores that on another mesh and goes on, too.

Losses are compared as means of a tenth of the steps. The tolerance is measured: on the `fsdp` mesh the first half of
(a) is run in float32, too (TF32 products), and `d` is the largest difference that bfloat16 makes there, single tokens
that go to other experts included. Each run in bfloat16 is off by about d, so two differ by up to 2 d; as d is itself a
sample, 3 d are granted.

Each case is a process of its own with a time limit, and each result is written when it is there. Where cases need fewer
devices than there are left, they go side by side, each on its own. A step's time is the median of windows of a tenth of
the steps, the devices synchronised before and after each, the first window left out.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_results

Job = dict[str, Any]
Rows = dict[str, dict[str, Any]]

LARGE = {
    "moe": {"preset": "deepseek-1b", "vocab_size": 32_000, "context_length": 1024},
    "llama": {"preset": "llama-1b", "vocab_size": 128_256, "context_length": 2048},
}
_NARROW = {"layers": 2, "width": 64, "heads": 4, "head_width": 16, "ffn_width": 64, "vocab_size": 320}
_NARROW["context_length"] = 32
TINY = {
    "moe": {
        **_NARROW,
        "preset": "deepseek-tiny",
        "experts": 8,
        "rotary_width": 8,
        "kv_latent": 32,
        "query_latent": 32,
    },
    "llama": {**_NARROW, "preset": "llama-tiny", "kv_heads": 4},
}
ROWS = {"moe": 6, "llama": 8}  # sequences of a device; six keep the whole on two GPUs under seven minutes
MESHES: dict[int, list[dict[str, int]]] = {
    8: [{"fsdp": 8}, {"data": 2, "pipeline": 2, "tensor": 2}, {"fsdp": 4, "expert": 2}],
    4: [{"fsdp": 4}, {"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}],
    2: [{"fsdp": 2}, {"pipeline": 2}, {"tensor": 2}, {"expert": 2}],
}
"""By the number of devices; the first is saved half-way, and restored on the second."""
PIPELINE_MICRO_BATCHES = 4
WINDOWS = 10
LLAMA_STEPS = 40
LIMIT_S, LIMIT_FLOAT32_S = 180, 300
GRANTED = 3  # times what bfloat16 changes


def jobs_of(count: int, steps: int, models: dict[str, dict[str, Any]], folder: str) -> list[Job]:
    """All cases, in the order in which they are to start."""
    saved, other = MESHES[count][:2]

    def moe(name: str, mesh: dict[str, int], devices: int, **more: Any) -> Job:
        rows = ROWS["moe"] * count
        micro = rows // PIPELINE_MICRO_BATCHES if "pipeline" in mesh else min(rows, 2 * ROWS["moe"] * devices)
        job = {"name": name, "model": models["moe"], "mesh": mesh, "devices": devices, "rows": rows, "micro": micro}
        return job | {"steps": steps, "dtype": "bfloat16", "scan": True, "folder": folder} | more

    def llama(devices: int) -> Job:
        rows, mesh = ROWS["llama"] * devices, {"fsdp": devices} if devices > 1 else {}
        job = {"name": f"llama, fsdp {devices}", "model": models["llama"], "mesh": mesh, "devices": devices}
        job |= {"rows": rows, "micro": rows, "steps": min(steps, LLAMA_STEPS), "dtype": "bfloat16"}
        return job | {"scan": models is TINY}

    fewer = [llama(devices) for devices in (1, 2, 4) if devices < count]
    others = [moe(f"moe, {words(mesh)}", mesh, count) for mesh in MESHES[count][1:]]
    return [
        moe("moe, one device", {}, 1),
        *fewer,
        moe(f"moe, {words(saved)}", saved, count, save=True),
        moe(f"moe, {words(saved)}, float32", saved, count, dtype="float32", until=steps // 2, limit_s=LIMIT_FLOAT32_S),
        *others,
        llama(count),
        moe(f"moe, {words(saved)}, then {words(other)}", other, count, restore=True),
    ]


def words(mesh: dict[str, int]) -> str:
    """A mesh as the tables call it."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def run_of(job: Job) -> Any:
    """The run file of a case."""
    from meshwright.config import make_run

    train = {
        "steps": job["steps"],
        "batch_size": job["rows"],
        "micro_batch_size": job["micro"],
        "sequence_length": job["model"]["context_length"],
        "compute_dtype": job["dtype"],
        "scan_layers": job["scan"],
    }
    return make_run(
        {
            "data": {"train": "x"},
            "model": job["model"],
            "mesh": {"data": 1} | job["mesh"],
            "optimizer": {"learning_rate": 3e-4},
            "schedule": {"warmup_steps": job["steps"] // 5},
            "train": train,
        }
    )


def work(job: Job) -> dict[str, Any]:
    """A case's process: train, and say what came out."""
    from meshwright.engines.jax.engine import JaxEngine
    from meshwright.engines.jax.memory_check import compiled_bytes
    from meshwright.planning import make_plan

    run = run_of(job)
    plan = make_plan(run, compiled=False)
    engine = JaxEngine(run, run.model.spec)
    window, half = job["steps"] // WINDOWS, job["steps"] // 2
    folder = Path(job["folder"]) / "saved" if {"save", "restore"} & job.keys() else Path()
    if job.get("restore"):
        engine.restore(folder)
    text, losses, seconds = read_text(), [], []
    row: dict[str, Any] = {"parameters": plan.state.parameters, "flops_per_token": plan.flops_per_token}
    for first in range(half if job.get("restore") else 0, job.get("until", job["steps"]), window):
        if job.get("save") and first == half:
            row |= peak_bytes()  # before the state is copied
            folder.mkdir()
            engine.save(folder)()
        start = time.perf_counter()
        found = [engine.train_step(batch_of(text, job, step))["loss"] for step in range(first, first + window)]
        losses += [float(loss) for loss in found]
        seconds.append((time.perf_counter() - start) / window)
    step_s, tokens = statistics.median(seconds[1:]), plan.tokens_per_step
    row |= {"losses": np.reshape(losses, (-1, window)).mean(axis=1).tolist(), "after_half": losses[-half]}
    row |= {"step_s": step_s, "fastest_s": min(seconds[1:]), "slowest_s": max(seconds[1:])}
    row |= {"tokens_per_s": tokens / step_s}
    if engine.token_seconds:
        row["mfu"] = engine.token_seconds * tokens / step_s
    compiled: Any = engine._train_step
    return peak_bytes() | row | {"plan_bytes": plan.estimate.total, "xla_bytes": compiled_bytes(compiled)}


def read_text() -> np.ndarray:
    """Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\0".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)


def batch_of(text: np.ndarray, job: Job, step: int) -> Any:
    """The batch of a step: the same whatever the mesh."""
    from meshwright.data.examples import Batch

    length = job["model"]["context_length"]
    starts = np.random.default_rng(step).integers(0, len(text) - length, job["rows"])
    tokens = np.stack([text[start : start + length + 1] for start in starts])
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((job["rows"], length), np.float32))


def peak_bytes() -> dict[str, int]:
    """The most that any of the devices has held, where they tell."""
    import jax

    memory = [device.memory_stats() for device in jax.local_devices()]
    return {"peak_bytes": max(stats["peak_bytes_in_use"] for stats in memory if stats)} if any(memory) else {}


def waves(jobs: list[Job], count: int) -> Iterator[list[Job]]:
    """Cases that go side by side: neighbours for which there are devices enough."""
    wave: list[Job] = []
    for job in jobs:
        if wave and sum(one["devices"] for one in wave) + job["devices"] > count:
            yield wave
            wave = []
        wave.append(job)
    yield wave


def start(job: Job, first: int, tiny: bool, folder: Path) -> subprocess.Popen:
    """A case as a process, on devices of its own, with what it says in files."""
    environment = dict(os.environ)
    if tiny:
        flags = f"--xla_force_host_platform_device_count={job['devices']} --xla_backend_optimization_level=0"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    else:
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards[first : first + job["devices"]])
        if job["dtype"] == "float32":  # whose search for the fastest products would take minutes
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
            environment["JAX_DEFAULT_MATMUL_PRECISION"] = "tensorfloat32"
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    with (folder / f"{job['name']}.out").open("wb") as out, (folder / f"{job['name']}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)


def finish(process: subprocess.Popen, job: Job, begun: float, folder: Path) -> dict[str, Any]:
    """What came of a case: its figures, or how it failed."""
    name, limit = job["name"], job.get("limit_s", LIMIT_S)
    try:
        code = process.wait(timeout=max(begun + limit - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"error": f"not done after {limit} s"}
    if code:
        return {"error": f"exit code {code}: {(folder / f'{name}.err').read_text(errors='replace')[-1500:]}"}
    return json.loads((folder / f"{name}.out").read_text().splitlines()[-1])


def run_wave(wave: list[Job], tiny: bool, folder: Path) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Cases side by side, each with its figures."""
    begun, first, processes = time.monotonic(), 0, []
    try:
        for job in wave:
            processes.append(start(job, first, tiny, folder))
            first += job["devices"]
        for job, process in zip(wave, processes, strict=True):
            row = finish(process, job, begun, folder)
            yield job, row | {"whole_s": round(time.monotonic() - begun, 1)}
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def difference(one: list[float], other: list[float]) -> float:
    """The largest between means of a tenth of the steps; of the last ones, where a run has only those."""
    many = min(len(one), len(other))
    return float(np.abs(np.subtract(one[-many:], other[-many:])).max())


def compared(rows: Rows, count: int) -> dict[str, Any]:
    """How the losses of the meshes differ, and by how much they may; weak scaling; what the restored run does."""
    saved, other = (words(mesh) for mesh in MESHES[count][:2])
    whole, exact, restored = f"moe, {saved}", f"moe, {saved}, float32", f"moe, {saved}, then {other}"
    losses = {name: row["losses"] for name, row in rows.items() if "losses" in row}
    alike = [name for name in losses if name.startswith("moe") and name not in (exact, restored)]
    found: dict[str, Any] = {"against_float32": {}, "tolerance": None}
    if exact in losses:
        begun = len(losses[exact])
        found["against_float32"] = {name: difference(losses[name][:begun], losses[exact]) for name in alike}
    if whole in found["against_float32"]:
        found["tolerance"] = GRANTED * found["against_float32"][whole]
    pairs = {f"{a} | {b}": difference(losses[a], losses[b]) for a, b in combinations(alike, 2)}
    found |= {"between": pairs, "largest": max(pairs.values(), default=None)}
    if whole in losses and restored in losses:
        found["restored"] = {
            "saved_on": saved,
            "restored_on": other,
            "after_half": [rows[restored]["after_half"], rows[whole]["after_half"]],
            "against_unbroken": difference(losses[restored], losses[whole]),
        }
    alone = rows.get("llama, fsdp 1", {}).get("step_s")
    scaled = {name: row["step_s"] for name, row in rows.items() if name.startswith("llama") and "step_s" in row}
    return found | {"share_of_linear": {name: alone / step_s for name, step_s in scaled.items() if alone}}


def what_is_off(rows: Rows, found: dict[str, Any]) -> list[str]:
    """Cases that failed, losses that don't agree or don't fall."""
    off = [f"{name}: {row['error'].splitlines()[-1]}" for name, row in rows.items() if "error" in row]
    off += [f"{name}: the loss rises" for name, row in rows.items() if rises(row.get("losses", []))]
    if not found["tolerance"]:
        return [*off, "no tolerance"]
    off += [f"{pair}: {gap:.4f}" for pair, gap in found["between"].items() if gap > found["tolerance"]]
    restored = found.get("restored")
    if restored:
        gaps = restored["against_unbroken"], abs(float(np.subtract(*restored["after_half"])))
        off += ["losses of the restored run"] if max(gaps) > found["tolerance"] else []
    return off


def rises(losses: list[float]) -> bool:
    """Whether the last loss of a whole run isn't below the first."""
    return len(losses) == WINDOWS and not losses[-1] < losses[0]


def here(tiny: int) -> tuple[int, str]:
    """How many devices there are to use, and what they are; asked for in a process that gives their memory back."""
    if tiny:
        return tiny, "virtual CPU device"
    code = "import jax; print(len(jax.devices()), jax.devices()[0].device_kind, sep=';')"
    many, card = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1].split(";")
    counts = [count for count in MESHES if count <= int(many)]
    if not counts:
        sys.exit(f"there is 1 x {card}: at least 2 are needed, or --tiny 2")
    return max(counts), card


def main() -> None:
    """Measure, write each result, and say what is off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="of each case of (a), a multiple of 10 (100, tiny: 10)")
    parser.add_argument("--tiny", type=int, default=0, choices=list(MESHES), help="so many virtual devices of a CPU")
    parser.add_argument("--job", help="(the script calls itself with this)")
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(work(json.loads(arguments.job))))
        return
    tiny = bool(arguments.tiny)
    steps = arguments.steps or (10 if tiny else 100)
    if steps < WINDOWS or steps % WINDOWS:
        parser.error(
            f"--steps {steps}: must be a multiple of {WINDOWS}, since losses are means over tenths of the steps"
        )
    count, card = here(arguments.tiny)
    measured_on = machine("jax", "flax", "optax") | {"card": card, "cards": count}
    rows: Rows = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for wave in waves(jobs_of(count, steps, TINY if tiny else LARGE, folder), count):
            for job, row in run_wave(wave, tiny, Path(folder)):
                name = job["name"]
                rows[name] = {key: job[key] for key in ("mesh", "devices", "rows", "micro", "dtype", "steps")} | row
                print(name, row, flush=True)
                found = compared(rows, count)
                results = {"seconds": round(time.monotonic() - begun, 1), "steps": steps, "cases": rows, **found}
                results["off"] = what_is_off(rows, found)
                write_results(f"{tempfile.gettempdir()}/gpu_eight_tiny" if tiny else "gpu_eight", measured_on, results)
    print(json.dumps({**found, "seconds": results["seconds"]}))
    if results["off"]:
        sys.exit(f"off: {'; '.join(results['off'])}")


if __name__ == "__main__":
    main()
