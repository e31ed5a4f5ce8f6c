"""The PyTorch engine on two GPUs over NCCL: the losses of one card, and what a step costs beside it.

    python benchmarks/gpu_torch_scale.py     writes results/gpu_torch_scale.json; ends with 1 where losses differ

- Losses: a small Qwen2 in float32, eight rows of random token ids in two micro-batches, five steps of AdamW with
  clipping: on each mesh those of one card, to 1e-5. In bfloat16 those of one card and of `data 2`, where each process
  has at once the rows of one of one card's micro-batches: how far apart they are is written.
- Weak scaling: the shape of Qwen2.5-0.5B in bfloat16, 8 rows of 512 and of 2,048 random token ids a card, windows of
  ten steps, the devices synchronised before and after each: the median window counts. The share of linear is the time
  on one card over that on two. `tensor 2` has as many rows as one card.
- Beside them on two cards, with as many rows: the tutorial's step of `gpu_torch.py` in `DistributedDataParallel`, and
  `transformers.Trainer` as it is started there.

One process a card; those of two cards do all their meshes one after another.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import machine, write_results

MESHES: dict[str, dict[str, int]] = {
    "one card": {},
    "data 2": {"data": 2},
    "fsdp 2": {"fsdp": 2},
    "tensor 2": {"tensor": 2},
}
REPLICAS = ("one card", "data 2")
"""Where each process has the whole model, and computes with copies of its parameters."""
TINY = {"preset": "qwen2-tiny", "layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "head_width": 32}
TINY |= {"ffn_width": 256, "vocab_size": 1003, "context_length": 256}
WHOLE = {"preset": "qwen2.5-0.5b", "vocab_size": 151936}
THEIRS = ["data 2, tutorial's step", "data 2, `transformers.Trainer`"]
ROWS, TIMES = 8, (512, 2048)  # of a card
STEPS, WINDOWS, PATIENCE = 10, 3, 400


def engine_of(model: dict[str, Any], mesh: dict[str, int], train: dict[str, Any]) -> Any:
    """An engine; in each process of the mesh."""
    import meshwright
    from meshwright.engines.torch.engine import TorchEngine

    values = {"engine": "torch", "data": {"train": "x"}, "model": model, "mesh": {"data": 1, **mesh}}
    run = meshwright.make_run({**values, "optimizer": {"learning_rate": 3e-3}, "train": {"steps": 100, **train}})
    return TorchEngine(run, run.model.spec)


def batch_of(engine: Any, seed: int, rows: int, time_: int, vocab: int) -> Any:
    """This process's rows of a batch of random ids."""
    from meshwright.data.examples import Batch

    ids = np.random.default_rng(seed).integers(0, vocab, (rows, time_ + 1), dtype=np.int32)[engine.rows]
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((len(ids), time_), np.float32))


def losses(mesh: dict[str, int], dtype: str = "float32", micro: int = 4) -> list[float]:
    """Of five steps of the small model, with micro-batches of so many rows of all processes."""
    rows, time_ = 8, 128
    train = {"batch_size": rows, "micro_batch_size": micro, "sequence_length": time_, "compute_dtype": dtype}
    engine = engine_of(TINY, mesh, train)
    return [float(engine.train_step(batch_of(engine, step, rows, time_, 1003))["loss"]) for step in range(5)]


def speed(mesh: dict[str, int], time_: int) -> dict[str, Any]:
    """Seconds of a step of the large one."""
    import torch

    torch.compiler.reset()  # else what was compiled for one shape is compiled for any at the next
    rows = ROWS * mesh.get("data", 1) * mesh.get("fsdp", 1)
    engine = engine_of(WHOLE, mesh, {"batch_size": rows, "sequence_length": time_})
    batches = [batch_of(engine, seed, rows, time_, WHOLE["vocab_size"]) for seed in range(4)]
    torch.cuda.reset_peak_memory_stats()
    first, *_ = [float(engine.train_step(batch)["loss"]) for batch in batches]
    windows = []
    for _ in range(WINDOWS):
        started = time.perf_counter()
        for number in range(STEPS):
            loss = engine.train_step(batches[number % len(batches)])["loss"]
        last = float(loss)
        windows.append((time.perf_counter() - started) / STEPS)
    found = {"rows": rows, "step_s": statistics.median(windows), "fastest_s": min(windows), "slowest_s": max(windows)}
    found |= {"first_loss": first, "last_loss": last, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    share = engine.token_seconds
    return found | ({"mfu": share * rows * time_ / found["step_s"]} if share else {})


def their_speed(name: str, time_: int, rank: int) -> dict[str, Any]:
    """Seconds of a step of others, each process with rows of its own."""
    import gpu_torch
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ids = np.random.default_rng(rank).integers(0, WHOLE["vocab_size"], (4, ROWS, time_ + 1), dtype=np.int32)
    if "Trainer" in name:
        found = gpu_torch.trainer(ROWS, time_, ids)
    else:
        torch.distributed.init_process_group("nccl")
        found = gpu_torch.timed(gpu_torch.tutorial_step(ROWS, time_, DistributedDataParallel), ids)
        torch.distributed.destroy_process_group()
    rated = gpu_torch.with_rates(f"8 x {time_}", found, torch.cuda.get_device_name(0))
    found |= {"rows": 2 * ROWS, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return found | ({"mfu": rated["mfu"]} if "mfu" in rated else {})


def work(names: list[str], time_: int, rank: int, port: int) -> None:
    """What a process does: prints a line for each mesh and length."""
    from meshwright.launch.torch_group import join, leave

    if names[0] in THEIRS:
        print(json.dumps({titled(names[0], time_): their_speed(names[0], time_, rank)}), flush=True)
        return
    group = join(port, rank, 2) if names != ["one card"] else None
    for name in names:
        mesh = MESHES[name]
        row = {"losses": losses(mesh)}
        if name in REPLICAS:
            row["bfloat16_losses"] = losses(mesh, "bfloat16", 4 * mesh.get("data", 1))
        for length in TIMES:
            more = row if length == TIMES[-1] else {}
            print(json.dumps({titled(name, length): more | speed(mesh, length)}), flush=True)
    if group is not None:
        leave(group)


def titled(name: str, time_: int) -> str:
    """A case's name."""
    return f"{name}, T {time_:,}"


def as_torchrun(rank: int, cards: int, port: int) -> dict[str, str]:
    """What others look for in the environment, where each process sees its own card alone."""
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cards)}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rows_of(names: list[str], times: tuple[int, ...], cards: int) -> dict[str, Any]:
    """The figures of meshes of so many cards at these lengths, by processes of their own."""
    from meshwright.launch.processes import reserved_port

    with reserved_port() as theirs:
        pass  # the port of others, who can't open one that is held
    with reserved_port() as port:
        command = [sys.executable, __file__, "--cases", ";".join(names), "--time", str(times[0])]
        command += ["--port", str(port), "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env={
                    **os.environ,
                    **(as_torchrun(rank, cards, theirs) if names[0] in THEIRS else {}),
                    "CUDA_VISIBLE_DEVICES": str(rank),
                },
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
                text=True,
            )
            for rank in range(cards)
        ]
        late = ""
        try:
            output, error = ranks[0].communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            ranks[0].kill()
            output, error = ranks[0].communicate()
            late = f"more than {PATIENCE} s"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    found = {
        name: row for line in output.splitlines() if line.startswith('{"') for name, row in json.loads(line).items()
    }
    titles = [titled(name, time_) for name in names for time_ in times]
    return found | {title: {"error": late or error[-1500:]} for title in titles if title not in found}


def main() -> None:
    """Measure, write the results, and say what is off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", help="(the script calls itself with this)")
    parser.add_argument("--time", type=int, help="(and with this)")
    parser.add_argument("--rank", type=int, help="(and with this)")
    parser.add_argument("--port", type=int, help="(and with this)")
    arguments = parser.parse_args()
    if arguments.cases:
        work(arguments.cases.split(";"), arguments.time, arguments.rank, arguments.port)
        return
    code = "import torch; print(torch.cuda.get_device_name(0))"
    card = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    measured_on = {**machine("torch", "transformers"), "card": card, "cards": 2}
    one, *others = MESHES
    cases = rows_of([one], TIMES, 1) | rows_of(others, TIMES, 2)
    for name in THEIRS:
        for time_ in TIMES:
            cases |= rows_of([name], (time_,), 2)
    off = [name for name, row in cases.items() if "error" in row]
    for name in others:
        for time_ in TIMES:
            row, alone = cases[titled(name, time_)], cases[titled(one, time_)]
            if "error" in row or "error" in alone:
                continue
            row |= {"share_of_linear": alone["step_s"] / row["step_s"]} if name != "tensor 2" else {}
            for key in ("losses", "bfloat16_losses"):
                if key in row:
                    row[f"{key}_away"] = float(np.abs(np.subtract(row[key], alone[key])).max())
            off += [name] if not row.get("losses_away", 0.0) < 1e-5 else []
    for name, row in cases.items():
        print(name, row, flush=True)
    write_results("gpu_torch_scale", measured_on, {"cases": cases})
    if off:
        sys.exit(f"off: {', '.join(off)}")


if __name__ == "__main__":
    main()
