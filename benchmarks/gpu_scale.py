"""From one GPU to two, and to four: what a step costs on more cards, beside what one would expect of it.

    python benchmarks/gpu_scale.py                 writes results/gpu_scale.json
    python benchmarks/gpu_scale.py --cases "…;…"   takes some of all: results/gpu_scale_some.json

bfloat16, AdamW, clipping, random token ids. Each case is a process of its own; it compiles, and then is timed over
windows of ten steps, the devices synchronised before and after each: the median window counts. The first case of each
model is on one card, and the others are measured against it in the same call.

- Weak scaling: each card has as many rows as one has alone. The share of linear is the time on one card over that on
  several. Cases of four cards are left out where there are fewer.
- `pipeline 2`, with as many rows as one card alone has, in 8 micro-batches: expected is half the time of one card with
  the same micro-batches, over 1 - the bubble that `meshwright plan` prints.
- `tensor 2`, with as many rows: expected is half the time of one card, and what is sent over the bandwidth measured
  here for messages of that size: in each layer the residual stream is gathered twice and scattered twice forward, and
  as often backward.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import machine, write_results

GPT2 = {"preset": "gpt2", "vocab": 50257, "time": 1024, "rows": 32}
LLAMA = {"preset": "llama-1b", "vocab": 128256, "time": 2048, "rows": 8}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-124m, one card": {**GPT2, "mesh": {}},
    "gpt2-124m, data 2": {**GPT2, "mesh": {"data": 2}, "weak": True},
    "gpt2-124m, fsdp 2": {**GPT2, "mesh": {"fsdp": 2}, "weak": True},
    "llama-1b, one card": {**LLAMA, "mesh": {}},
    "llama-1b, fsdp 2": {**LLAMA, "mesh": {"fsdp": 2}, "weak": True},
    "llama-1b, tensor 2": {**LLAMA, "mesh": {"tensor": 2}},
    "llama-1b, one card, 8 micro-batches": {**LLAMA, "mesh": {}, "micro": 1},
    "llama-1b, pipeline 2": {**LLAMA, "mesh": {"pipeline": 2}, "micro": 1},
    "llama-1b, data 2": {**LLAMA, "mesh": {"data": 2}, "weak": True},
    "gpt2-124m, data 4": {**GPT2, "mesh": {"data": 4}, "weak": True},
    "gpt2-124m, fsdp 4": {**GPT2, "mesh": {"fsdp": 4}, "weak": True},
    "llama-1b, fsdp 4": {**LLAMA, "mesh": {"fsdp": 4}, "weak": True},
    "llama-1b, data 4": {**LLAMA, "mesh": {"data": 4}, "weak": True},
}
STEPS, WINDOWS = 10, 3
REPEATS = 20


def run_of(case: dict[str, Any]) -> Any:
    """The run file of a case."""
    from meshwright.config import make_run

    model = {"preset": case["preset"], "vocab_size": case["vocab"], "context_length": case["time"]}
    rows = case["rows"] * (cards_of(case) if case.get("weak") else 1)
    train = {
        "steps": 100,
        "batch_size": rows,
        "sequence_length": case["time"],
        "micro_batch_size": case.get("micro", rows),
    }
    return make_run({"data": {"train": "x"}, "model": model, "mesh": {"data": 1} | case["mesh"], "train": train})


def cards_of(case: dict[str, Any]) -> int:
    """How many cards a case has."""
    return math.prod(case["mesh"].values())


def work(name: str) -> dict[str, Any]:
    """Time the steps of a case, on as many cards as it has."""
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    case = CASES[name]
    run = run_of(case)
    engine = JaxEngine(run, run.model.spec)
    shape = (4, run.train.batch_size, case["time"] + 1)
    tokens = np.random.default_rng(0).integers(0, case["vocab"], shape, dtype=np.int32)
    weights = np.ones(shape[1:], np.float32)[:, 1:]
    batches = [Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), weights) for ids in tokens]
    losses = [float(engine.train_step(batch)["loss"]) for batch in batches]
    windows = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for number in range(STEPS):
            loss = engine.train_step(batches[number % len(batches)])["loss"]
        losses.append(float(loss))
        windows.append((time.perf_counter() - start) / STEPS)
    row = {"first_loss": losses[0], "last_loss": losses[-1], "step_s": statistics.median(windows)}
    row |= {"fastest_s": min(windows), "slowest_s": max(windows), "rows": run.train.batch_size}
    row["peak_flops_share"] = (engine.token_seconds or 0) * run.train.batch_size * case["time"] / row["step_s"]
    return row | expected_parts(name, run)


def expected_parts(name: str, run: Any) -> dict[str, Any]:
    """What the prediction of a case needs."""
    mesh = CASES[name]["mesh"]
    if "pipeline" in mesh:
        from meshwright.engines.jax.pipeline import bubble

        return {"bubble": bubble(mesh["pipeline"], 1, run.train.batch_size // run.micro_batch_size)}
    if "tensor" in mesh:
        stream = run.train.batch_size * CASES[name]["time"] * run.model.spec.width * 2
        # Each gather or scatter between two cards sends half of the stream each way.
        return {"sent_bytes": 8 * run.model.spec.layers * stream // 2, "bytes_per_second": bandwidth(stream // 2)}
    return {}


def bandwidth(sent: int) -> float:
    """Bytes a second that each of two cards sends, so many at a time, where it gathers and scatters in turn."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, cut = Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x")

    def to_and_fro(x: jax.Array) -> jax.Array:
        for _ in range(REPEATS):
            x = jax.lax.psum_scatter(jax.lax.all_gather(x, "x", tiled=True), "x", tiled=True)
        return x

    repeated = jax.jit(jax.shard_map(to_and_fro, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    x = jax.device_put(jnp.full(sent, 1e-3, jnp.bfloat16), NamedSharding(mesh, cut))  # two bytes each, on two cards
    repeated(x).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        repeated(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * REPEATS * sent / statistics.median(times)


def with_expectation(name: str, rows: dict[str, Any]) -> dict[str, Any]:
    """A case beside one card."""
    case, row = CASES[name], rows[name]
    first = name.split(",")[0]
    one = rows.get(f"{first}, one card, 8 micro-batches" if "pipeline" in case["mesh"] else f"{first}, one card", {})
    if "step_s" not in row or "step_s" not in one or not case["mesh"]:
        return row
    if case.get("weak"):
        return row | {"share_of_linear": one["step_s"] / row["step_s"]}
    if "bubble" in row:
        expected = one["step_s"] / 2 / (1 - row["bubble"])
    else:
        expected = one["step_s"] / 2 + row["sent_bytes"] / row["bytes_per_second"]
    return row | {"expected_s": expected, "measured_over_expected": row["step_s"] / expected}


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", help="some of them, with ';' between")
    parser.add_argument("--case", help="(the script calls itself with this)")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(work(arguments.case)))
        return
    measured_on, rows = machine("jax", "flax", "optax"), {}
    code = "import jax; print(jax.devices()[0].device_kind, len(jax.devices()), sep=';')"
    card, count = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1].split(";")
    measured_on |= {"card": card, "cards": int(count)}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = given.split(",") if given else [str(number) for number in range(int(count))]
    for name in arguments.cases.split(";") if arguments.cases else CASES:
        taken = cards[: cards_of(CASES[name])]
        if len(taken) < cards_of(CASES[name]):
            continue
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken)}
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = done.stdout.splitlines()
        rows[name] = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}
        rows[name] = with_expectation(name, rows)
        print(name, rows[name], flush=True)
        write_results("gpu_scale_some" if arguments.cases else "gpu_scale", measured_on, {"cases": rows})


if __name__ == "__main__":
    main()
