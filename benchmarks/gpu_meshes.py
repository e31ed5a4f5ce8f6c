"""Each mesh of two GPUs against one GPU of the same machine: losses in float32, and speed in bfloat16.

    python benchmarks/gpu_meshes.py            writes results/gpu_meshes.json
    python benchmarks/gpu_meshes.py --exact    the float32 losses alone

For each family, the same seed and the same batches on one GPU and on each mesh of two: the losses of five float32
steps must agree to 1e-5 (matrix products at full float32 precision). Then tokens a second of the bfloat16 step at a
larger size, the median of the steps after the first five, device-synchronised, on random token ids.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
from common import machine, write_results

SMALL = {"layers": 4, "width": 256, "heads": 8, "ffn_width": 512, "context_length": 256, "vocab_size": 4093}
FAMILIES = {
    "gpt2": {**SMALL, "preset": "gpt2-tiny", "dropout": 0.1},
    "llama": {**SMALL, "preset": "llama-tiny", "kv_heads": 4, "head_width": 32},
    "moe": {**SMALL, "preset": "moe-tiny", "kv_heads": 4, "head_width": 32},
    "mla-moe": {**SMALL, "preset": "deepseek-tiny", "head_width": 32, "kv_latent": 64, "query_latent": 96},
}
MESHES = [
    {"data": 2},
    {"fsdp": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "pipeline_rounds": 2},
    {"context": 2},
    {"expert": 2},
]
LARGE = {"preset": "llama-360m", "vocab_size": 32000, "context_length": 2048}


def losses(model: dict, mesh: dict, batch: int, length: int, micro: int, steps: int, dtype: str) -> dict:
    """Losses of some steps, the seconds of each, and what the loss and the devices were."""
    from meshwright.config import make_run
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    run = make_run(
        {
            "data": {"train": "x"},
            "model": model,
            "mesh": {"data": 1, **mesh},
            "train": {
                "steps": 100,
                "batch_size": batch,
                "micro_batch_size": micro,
                "sequence_length": length,
                "compute_dtype": dtype,
                "scan_layers": True,
            },
        }
    )
    engine = JaxEngine(run, run.model.spec)
    found, seconds = [], []
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, model["vocab_size"], (batch, length + 1)).astype(np.int32)
        data = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((batch, length), np.float32))
        started = time.perf_counter()
        found.append(float(engine.train_step(data)["loss"]))
        seconds.append(time.perf_counter() - started)
    import jax

    memory = [device.memory_stats() for device in jax.local_devices()]
    peak = [stats["peak_bytes_in_use"] for stats in memory if stats]
    return {"losses": found, "seconds": statistics.median(seconds[5:] or seconds), "peak_bytes": peak}


def in_process(cards: int, jobs: list[dict]) -> list[dict]:
    """Run jobs in a process that sees so many cards."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards)))}
    command = [sys.executable, __file__, "--jobs", json.dumps(jobs)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def work(jobs: list[dict]) -> None:
    """The other side of `in_process`."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    found = []
    for job in jobs:
        if job["dtype"] == "bfloat16":
            jax.config.update("jax_default_matmul_precision", None)
        try:
            found.append(losses(**job))
        except Exception as error:  # one mesh that fails must not hide the others
            found.append({"error": f"{type(error).__name__}: {error}"[:2000]})
        print(job["model"]["preset"], job["mesh"], found[-1], file=sys.stderr, flush=True)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--families", default=",".join(FAMILIES))
    arguments = parser.parse_args()
    if arguments.jobs:
        work(json.loads(arguments.jobs))
        return
    exact = {"batch": 16, "length": 128, "micro": 4, "steps": 5, "dtype": "float32"}
    fast = {"batch": 32, "length": 2048, "micro": 8, "steps": 12, "dtype": "bfloat16"}
    families = arguments.families.split(",")
    meshes = {f: [m for m in MESHES if "expert" not in m or "moe" in f] for f in families}
    two = [{"model": FAMILIES[f], "mesh": mesh, **exact} for f in families for mesh in meshes[f]]
    one = [{"model": FAMILIES[f], "mesh": {}, **exact} for f in families]
    large = [] if arguments.exact else MESHES[:-1]
    two += [{"model": LARGE, "mesh": mesh, **fast} for mesh in large]
    one += [{"model": LARGE, "mesh": {}, **fast}] if large else []
    alone, both = in_process(1, one), in_process(2, two)
    rows, reference = [], dict(zip([*families, *(["large"] if large else [])], alone, strict=True))
    names = [f for f in families for _ in meshes[f]] + ["large"] * len(large)
    for name, job, result in zip(names, two, both, strict=True):
        row = {"family": name, "mesh": job["mesh"], "dtype": job["dtype"], **result}
        if "losses" in result:
            pairs = zip(result["losses"], reference[name]["losses"], strict=True)
            row["largest_difference"] = max(abs(a / b - 1) for a, b in pairs)
            row["speed_against_one"] = reference[name]["seconds"] / result["seconds"]
        rows.append(row)
        print(name, job["mesh"], {k: row.get(k) for k in ("largest_difference", "speed_against_one", "error")})
    import jax

    facts = {**machine("jax", "flax", "optax"), "cards": [device.device_kind for device in jax.devices()]}
    write_results("gpu_meshes", facts, {"one_card": reference, "two_cards": rows})


if __name__ == "__main__":
    main()
