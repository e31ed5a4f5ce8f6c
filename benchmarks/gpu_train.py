"""Training on one GPU: Meshwright beside a plain PyTorch step, a tutorial's step of Flax, and its own bare step.

    python benchmarks/gpu_train.py               writes results/gpu_train.json
    python benchmarks/gpu_train.py --cases "…;…"  takes some of all: results/gpu_train_some.json
    python benchmarks/gpu_train.py --program     the whole program beside its bare step: results/gpu_program.json

bfloat16, AdamW, clipping, random token ids over the whole vocabulary, but with `--program` bytes of text on both sides;
`float8` is the engine's step with `train.float8`. Each side is a process of its own that has the card to itself; it
compiles, takes some steps, and then is timed over windows of ten steps, the device synchronised before and after each:
the median of four windows counts, with `--program` of twenty, as many steps as the program's. `program` is the whole of
`meshwright train` on text of this machine, with its loader, a record every 10 steps and a checkpoint every 200: the
time between two of its records, 200 steps apart, by the clock of the process that started it. Between them is one
checkpoint, which isn't the first, for which things are compiled.

MFU is the share of the card's peak (`meshwright.engines.peaks`) of the operations that training on a token needs:
6 P + 12 L H Q T (`meshwright.engines.flops.training_flops`), experts that a token doesn't pass left out. The peak is
that of bfloat16, of `float8` too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import card, machine, write_results

GPT2 = {"family": "gpt2", "vocab": 50257, "time": 1024}
LLAMA = {"family": "llama", "preset": "llama-1b", "vocab": 128256, "width": 2048, "layers": 16, "heads": 32}
LLAMA |= {"kv_heads": 8, "ffn_width": 8192}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**GPT2, "preset": "gpt2", "width": 768, "layers": 12, "heads": 12, "batch": 32},
    "gpt2-350m": {**GPT2, "preset": "gpt2-medium", "width": 1024, "layers": 24, "heads": 16, "batch": 16},
    "llama-1b": {**LLAMA, "time": 2048, "batch": 8},
    "llama-1b, T 16384": {**LLAMA, "time": 16384, "batch": 1},
    "moe-1b": {"family": "moe", "preset": "moe-1b", "vocab": 32000, "time": 2048, "batch": 16},
}
SIDES = {
    "gpt2-124m": ["ours", "torch", "tutorial"],
    "gpt2-350m": ["ours", "torch"],
    "llama-1b": ["ours", "float8", "torch"],
    "llama-1b, T 16384": ["ours"],
    "moe-1b": ["ours"],
}
PROGRAM_SIDES = {"gpt2-124m": ["ours", "program"], "llama-1b": ["ours", "program"]}
STEPS, WINDOWS = 10, 4
PROGRAM_STEPS = (210, 410)
PROGRAM_WINDOWS = (PROGRAM_STEPS[1] - PROGRAM_STEPS[0]) // STEPS


def our_run(case: dict[str, Any], *, float8: bool = False) -> Any:
    """The run file of a case."""
    from meshwright.config import make_run

    model = {"preset": case["preset"], "vocab_size": case["vocab"], "context_length": case["time"]}
    train = {"batch_size": case["batch"], "sequence_length": case["time"], "steps": PROGRAM_STEPS[1]}
    train |= {"compute_dtype": "bfloat16", "float8": float8}
    optimizer = {"learning_rate": 3e-4}
    return make_run({"data": {"train": "x"}, "model": model, "optimizer": optimizer, "train": train})


def our_step(case: dict[str, Any], *, float8: bool = False) -> Callable[[np.ndarray, np.ndarray], Any]:
    """The engine's step, with nothing around it."""
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    run = our_run(case, float8=float8)
    engine = JaxEngine(run, run.model.spec)
    weights_BT = np.ones((case["batch"], case["time"]), np.float32)
    return lambda inputs, targets: engine.train_step(Batch(inputs, targets, weights_BT))["loss"]


def float8_step(case: dict[str, Any]) -> Callable[[np.ndarray, np.ndarray], Any]:
    """The same with the products of the blocks' linear maps in float8."""
    return our_step(case, float8=True)


def torch_step(case: dict[str, Any]) -> Callable[[np.ndarray, np.ndarray], Any]:
    """The PyTorch baseline's."""
    import torch
    import torch_gpu

    step = torch_gpu.make_step(case)

    def on_card(ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids).pin_memory().to("cuda", torch.long, non_blocking=True)

    return lambda inputs, targets: step(on_card(inputs), on_card(targets))


def tutorial_step(case: dict[str, Any]) -> Callable[[np.ndarray, np.ndarray], Any]:
    """The tutorial's."""
    import tutorial_gpt2

    return tutorial_gpt2.make_step(case)


STEPS_OF = {"ours": our_step, "torch": torch_step, "tutorial": tutorial_step, "float8": float8_step}


def some_batches(case: dict[str, Any], *, of_text: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of four steps: random ids, or bytes of the text that the whole program trains on."""
    shape, random = (4, case["batch"], case["time"] + 1), np.random.default_rng(0)
    if of_text:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        starts = random.integers(0, text.size - shape[2], shape[:2])
        tokens = text[starts[..., None] + np.arange(shape[2])].astype(np.int32)
    else:
        tokens = random.integers(0, case["vocab"], shape, dtype=np.int32)
    return [(ids[:, :-1].copy(), ids[:, 1:].copy()) for ids in tokens]


def work(side: str, names: list[str], *, of_text: bool) -> None:
    """A side's process: time steps of each case, and print what came out."""
    import gc

    windows = PROGRAM_WINDOWS if of_text else WINDOWS
    for name in names:
        case = CASES[name]
        batches = some_batches(case, of_text=of_text)
        started = time.perf_counter()
        step = STEPS_OF[side](case)
        first = float(step(*batches[0]))
        compiled = time.perf_counter() - started
        print(json.dumps({"first_step_s": compiled, "first_loss": first, **timed(step, batches, windows)}), flush=True)
        del step
        gc.collect()


def timed(
    step: Callable[[np.ndarray, np.ndarray], Any], batches: list[tuple[np.ndarray, np.ndarray]], many: int
) -> dict[str, Any]:
    """Seconds of a step: the median over so many windows, and the extremes."""
    for inputs, targets in batches:
        loss = step(inputs, targets)
    last, windows = float(loss), []
    for _ in range(many):
        start = time.perf_counter()
        for number in range(STEPS):
            loss = step(*batches[number % len(batches)])
        last = float(loss)
        windows.append((time.perf_counter() - start) / STEPS)
    return {
        "step_s": statistics.median(windows),
        "fastest_s": min(windows),
        "slowest_s": max(windows),
        "last_loss": last,
    }


def program(name: str) -> dict[str, Any]:
    """The whole of `meshwright train`: the time of a step by this process's clock, from one record to the last."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        run_file, log = Path(folder) / "run.toml", Path(folder) / "run" / "metrics.jsonl"
        run_file.write_text(run_text(case, folder))
        command = [sys.executable, "-c", "from meshwright.cli import main; main()", "train", str(run_file)]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        seen: dict[int, float] = {}
        while process.poll() is None:
            lines = log.read_text().splitlines() if log.exists() else []
            for line in lines[len(seen) :]:
                seen[json.loads(line)["step"]] = time.perf_counter() - start
            time.sleep(0.002)
        if process.returncode:
            raise RuntimeError(f"meshwright train ended with {process.returncode}")
        records = [json.loads(line) for line in log.read_text().splitlines()]
    first, last = PROGRAM_STEPS
    reported = [record for record in records if record["step"] >= first]
    return {
        "step_s": (seen[last] - seen[first]) / (last - first),
        "reported_step_s": statistics.median(record["step_seconds"] for record in reported),
        "reported_mfu": statistics.median(record.get("mfu", 0.0) for record in reported),
        "first_record_s": seen[min(seen)],
        "last_loss": records[-1]["loss"],
    }


def run_text(case: dict[str, Any], folder: str) -> str:
    """A run file over this machine's Python sources, as bytes; the model keeps its vocabulary."""
    return f"""
run_dir = "{folder}/run"
[data]
train = "python-stdlib"
store = "{folder}/store"
validation = 0
[tokenizer]
kind = "bytes"
[model]
preset = "{case["preset"]}"
vocab_size = {case["vocab"]}
context_length = {case["time"]}
[optimizer]
learning_rate = 3e-4
[train]
steps = {PROGRAM_STEPS[1]}
batch_size = {case["batch"]}
sequence_length = {case["time"]}
log_every = 10
eval_every = 0
sample_every = 0
[checkpoint]
every = 200
keep = 1
"""


def measure(side: str, names: list[str], *, of_text: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a side makes of its cases; one that fails must not hide the others."""
    if side == "program":
        for name in names:
            try:
                yield name, program(name)
            except (RuntimeError, OSError, KeyError) as error:
                yield name, {"error": f"{type(error).__name__}: {error}"[:500]}
        return
    command = [sys.executable, __file__, "--side", side, "--cases", ";".join(names), *["--program"] * of_text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for name in names:
            line = process.stdout.readline()
            yield name, json.loads(line) if line else {"error": "the process ended before this case"}


def with_rates(name: str, row: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """A side's figures, and what follows from them."""
    if "step_s" not in row:
        return row
    from meshwright.engines.jax.estimate import flops_per_token

    case = CASES[name]
    speed = case["batch"] * case["time"] / row["step_s"]
    flops = flops_per_token(our_run(case).model.spec, case["time"]) * speed
    return {**row, "tokens_per_s": speed, "tflop_per_s": flops / 1e12, **({"mfu": flops / peak} if peak else {})}


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", help="some of them, with ';' between")
    parser.add_argument("--program", action="store_true", help="the whole program beside its bare step")
    parser.add_argument("--side", help="(the script calls itself with this)")
    arguments = parser.parse_args()
    plan = PROGRAM_SIDES if arguments.program else SIDES
    names = arguments.cases.split(";") if arguments.cases else list(plan)
    if arguments.side:
        work(arguments.side, names, of_text=arguments.program)
        return
    from meshwright.engines.peaks import peak_flops

    measured_on = {**machine("jax", "flax", "optax", "torch"), "card": card()}
    peak = peak_flops(measured_on["card"])
    results: dict[str, Any] = {name: {**CASES[name], "sides": {}} for name in names}
    import jax

    jax.config.update("jax_platforms", "cpu")  # the card is the sides'
    for side in (*STEPS_OF, "program"):
        if not (of_side := [name for name in names if side in plan[name]]):
            continue
        for name, row in measure(side, of_side, of_text=arguments.program):
            results[name]["sides"][side] = with_rates(name, row, peak)
            print(name, side, results[name]["sides"][side], flush=True)
            write_results(name_of_results(arguments), measured_on, {"peak_flops": peak, "cases": results})


def name_of_results(arguments: argparse.Namespace) -> str:
    """Some cases never take the place of the file with all."""
    return ("gpu_program" if arguments.program else "gpu_train") + ("_some" if arguments.cases else "")


if __name__ == "__main__":
    main()
