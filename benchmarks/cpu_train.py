"""Tokens a second of a training step on the CPU: Meshwright's JAX engine beside a plain PyTorch GPT-2.

    pip install torch
    python benchmarks/cpu_train.py

Three shapes, float32, AdamW, clipping, same random token ids. Each side is a process of its own that lives through the
measurement; they take turns, some steps each, so that a machine whose speed drifts slows both. The ratio is the median
over the rounds of the ratio within a round. Our side is `JaxEngine.train_step` as `meshwright train` calls it.

The JAX engine has glibc keep the memory that a step frees (`meshwright.engines.jax.memory`). PyTorch gains from that
too, so a third process is the baseline with the same setting; its ratio stands beside.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from common import machine, write_results

SHAPES = {
    "d128-v4096": {"width": 128, "layers": 4, "heads": 4, "time": 128, "vocab": 4096, "batch": 16},
    "d384-v4096": {"width": 384, "layers": 6, "heads": 6, "time": 256, "vocab": 4096, "batch": 8},
    "d128-v50257": {"width": 128, "layers": 4, "heads": 4, "time": 128, "vocab": 50257, "batch": 16},
}
SIDES = ("ours", "torch", "torch-kept")
ROUNDS, SECONDS_A_TURN = 10, 2.0


def our_step(shape: dict[str, int]) -> Callable[[np.ndarray, np.ndarray], float]:
    """One update of the JAX engine on a GPT-2 of this shape."""
    from meshwright.config import make_run
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    width, time_ = shape["width"], shape["time"]
    model = {"preset": "gpt2", "width": width, "layers": shape["layers"], "heads": shape["heads"]}
    run = make_run(
        {
            "name": "cpu-train",
            "data": {"train": "none"},
            "model": {**model, "ffn_width": 4 * width, "context_length": time_, "vocab_size": shape["vocab"]},
            "train": {"batch_size": shape["batch"], "sequence_length": time_},
        }
    )
    engine = JaxEngine(run, run.model.spec)
    weights_BT = np.ones((shape["batch"], time_), np.float32)
    return lambda inputs, targets: float(engine.train_step(Batch(inputs, targets, weights_BT))["loss"])


def torch_step(shape: dict[str, int]) -> Callable[[np.ndarray, np.ndarray], float]:
    """One update of the baseline."""
    from torch_gpt2 import make_step

    names = ("width", "layers", "heads", "time", "vocab")
    return make_step(**{name: shape[name] for name in names}, threads=os.cpu_count() or 1)


def work(side: str, shape: dict[str, int]) -> None:
    """A side's process: for each line that comes in, take steps for a while, and print the median seconds of one."""
    random = np.random.default_rng(0)
    size = (8, 2, shape["batch"], shape["time"])
    batches = random.integers(0, shape["vocab"], size, dtype=np.int32)
    if side == "torch-kept":
        from meshwright.engines.jax.memory import keep_freed_memory

        assert keep_freed_memory()
    step = our_step(shape) if side == "ours" else torch_step(shape)
    first = step(*batches[0])
    for number in range(5):
        step(*batches[number])
    print(json.dumps({"first_loss": first}), flush=True)
    for _ in sys.stdin:
        times, end = [], time.perf_counter() + SECONDS_A_TURN
        while time.perf_counter() < end:
            start = time.perf_counter()
            step(*batches[len(times) % 8])
            times.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(times)), flush=True)


def flops_a_token(shape: dict[str, int]) -> float:
    """Matrix products of forward and backward: 6 a parameter that multiplies, 12 a layer, width and position."""
    matrices = 12 * shape["layers"] * shape["width"] ** 2 + shape["vocab"] * shape["width"]
    return 6 * matrices + 12 * shape["layers"] * shape["width"] * shape["time"]


def matmul_rate() -> float:
    """GFLOP/s of a 2048 x 1024 by 1024 x 1024 product in XLA: what this machine can do at best."""
    code = """
import time, jax, jax.numpy as jnp
a, b = jnp.ones((2048, 1024)), jnp.ones((1024, 1024))
f = jax.jit(lambda a, b: a @ b)
f(a, b).block_until_ready()
times = []
for _ in range(30):
    start = time.perf_counter()
    f(a, b).block_until_ready()
    times.append(time.perf_counter() - start)
print(2 * 2048 * 1024 * 1024 / sorted(times)[15] / 1e9)
"""
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


def compare(name: str) -> dict[str, float]:
    """Both sides of one shape in turn."""
    shape = SHAPES[name]
    sides = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--shape", name]
        sides[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        first = {side: json.loads(process.stdout.readline())["first_loss"] for side, process in sides.items()}
        assert all(abs(loss - np.log(shape["vocab"])) < 0.2 for loss in first.values()), first
        rounds = []
        for _ in range(ROUNDS):
            seconds = {}
            for side, process in sides.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                seconds[side] = json.loads(process.stdout.readline())
            rounds.append(seconds)
    finally:
        for process in sides.values():
            process.stdin.close()
            process.wait(timeout=30)
    tokens = shape["batch"] * shape["time"]
    speed = {side: tokens / statistics.median(r[side] for r in rounds) for side in SIDES}
    ratios = [r["torch"] / r["ours"] for r in rounds]
    return {
        **shape,
        "ours_tokens_per_s": speed["ours"],
        "torch_tokens_per_s": speed["torch"],
        "torch_kept_tokens_per_s": speed["torch-kept"],
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_torch_kept": statistics.median(r["torch-kept"] / r["ours"] for r in rounds),
        "ours_gflop_per_s": speed["ours"] * flops_a_token(shape) / 1e9,
        "matmul_gflop_per_s": matmul_rate(),
    }


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES, help="(the script calls itself with this)")
    parser.add_argument("--shape", choices=SHAPES, help="one shape instead of all; nothing is written")
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments.side, SHAPES[arguments.shape])
        return
    measured_on = machine("jax", "torch", "flax", "optax")
    figures = {}
    for name in [arguments.shape] if arguments.shape else SHAPES:
        figures[name] = compare(name)
        row = figures[name]
        print(
            f"{name:<12} ours {row['ours_tokens_per_s']:>8,.0f} tokens/s   torch {row['torch_tokens_per_s']:>8,.0f}   "
            f"ratio {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}), "
            f"{row['ratio_torch_kept']:.2f} to torch with the same malloc"
        )
    if not arguments.shape:
        print(write_results("cpu_train", measured_on, {"rounds": ROUNDS, "shapes": figures}))


if __name__ == "__main__":
    main()
