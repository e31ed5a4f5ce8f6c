"""Tokens a second of text generation: Meshwright's JAX engine beside `generate` of transformers, on the same model.

    pip install torch transformers safetensors
    python benchmarks/decode.py            float32 on the CPU, writes results/decode.json
    python benchmarks/decode.py --gpu      bfloat16 on a GPU, writes results/decode_gpu.json

Models with random weights, made by transformers, written as a checkpoint (for a GPU in bfloat16) and read by both
sides. Prompts of 64 tokens, 128 new ones, the likeliest each time, none ends a text. Each side is a process of its own
that lives through the measurement; they take turns, and the first call of each, which compiles, is told apart. On a GPU
a third side has transformers use its cache of fixed shape, for which it compiles the step too; and there the share of
the card's memory bandwidth is told that reading each parameter, two bytes, and the filled places of the cache once a
token takes: of the whole call, prompt included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_results

PROMPT, NEW, ROUNDS = 64, 128, 3
LLAMA = {"tie_word_embeddings": True, "max_position_embeddings": 2048}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, **LLAMA},
    },
    "gpt2-124m": {"model_type": "gpt2"},
    "llama-1b": {
        **{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, **LLAMA},
    },
}
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, by NVIDIA's data sheets
ON_CPU = {"shapes": ["smollm2-135m", "gpt2-124m"], "batches": [1, 8], "sides": ["ours", "transformers"]}
ON_GPU = {"shapes": ["llama-1b"], "batches": [1, 32], "sides": ["ours", "transformers", "transformers-static"]}

Generate = Callable[[np.ndarray], np.ndarray]


def write_model(name: str, folder: Path, gpu: bool) -> None:
    """A checkpoint of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    model.save_pretrained(folder)


def our_generate(folder: str, gpu: bool) -> Generate:
    """A function of prompts, `[B, P]`, to the tokens that the JAX engine goes on with."""
    from meshwright.config import make_run
    from meshwright.engines.base import Sampling
    from meshwright.engines.jax.engine import JaxEngine
    from meshwright.engines.jax.start import start_state

    train = {"sequence_length": PROMPT, "compute_dtype": "bfloat16" if gpu else "float32"}
    run = make_run({"data": {"train": "none"}, "model": {"init": f"hf:{folder}"}, "train": train})
    engine = JaxEngine(run, run.model.spec, training=False)
    engine._state = start_state(engine._program)

    def generate(prompts: np.ndarray) -> np.ndarray:
        return np.array(list(engine.generate(prompts.tolist(), NEW, -1, Sampling(temperature=0.0)))).T

    return generate


def their_generate(folder: str, gpu: bool, static: bool) -> Generate:
    """The same of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    more = {"cache_implementation": "static"} if static else {}

    def generate(prompts: np.ndarray) -> np.ndarray:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **more)
        return out[:, PROMPT:].cpu().numpy()

    return generate


def work(side: str, folder: str, gpu: bool) -> None:
    """A side's process: for each number of prompts that comes in, generate, and print the seconds and the tokens."""
    is_ours = side == "ours"
    generate = our_generate(folder, gpu) if is_ours else their_generate(folder, gpu, side.endswith("static"))
    for line in sys.stdin:
        prompts = np.random.default_rng(0).integers(0, 40_000, (int(line), PROMPT))
        start = time.perf_counter()
        tokens = generate(prompts)
        seconds = time.perf_counter() - start
        assert tokens.shape == (int(line), NEW), tokens.shape
        print(json.dumps({"seconds": seconds, "tokens": tokens.tolist()}), flush=True)


def compare(name: str, batches: list[int], sides: list[str], gpu: bool) -> Iterator[dict[str, Any]]:
    """All sides on one model, in turn: what comes out for each batch."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(name, Path(folder), gpu)
        processes = {side: _start(side, folder, gpu) for side in sides}
        try:
            for batch in batches:
                first = {side: _ask(process, batch) for side, process in processes.items()}
                rounds = [{side: _ask(process, batch) for side, process in processes.items()} for _ in range(ROUNDS)]
                yield {"model": name, "batch": batch, **_figures(batch, first, rounds)}
        finally:
            for process in processes.values():
                process.stdin.close()
                process.wait(timeout=60)


def _figures(batch: int, first: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    speed = {side: batch * NEW / statistics.median(r[side]["seconds"] for r in rounds) for side in first}
    ours = np.array(first["ours"]["tokens"])
    theirs = {side: statistics.median(r[side]["seconds"] / r["ours"]["seconds"] for r in rounds) for side in first}
    return {
        "tokens_per_second": speed,
        "first_call_seconds": {side: answer["seconds"] for side, answer in first.items()},
        "ratio": {side: ratio for side, ratio in theirs.items() if side != "ours"},
        "same_tokens": float((ours == np.array(first["transformers"]["tokens"])).mean()),
    }


def _start(side: str, folder: str, gpu: bool) -> subprocess.Popen:
    # Both sides share the GPU's memory.
    platform = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if gpu else {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--side", side, "--folder", folder, *(["--gpu"] if gpu else [])]
    environment = {**os.environ, **platform}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(process: subprocess.Popen, batch: int) -> dict[str, Any]:
    process.stdin.write(f"{batch}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _card() -> str:
    code = "import torch; print(torch.cuda.get_device_name(0))"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def _share_of_bandwidth(row: dict[str, Any], card: str) -> dict[str, float] | None:
    peak = next((bytes_ for name, bytes_ in BANDWIDTH.items() if name in card), None)
    shape = SHAPES[row["model"]]
    if peak is None or "hidden_size" not in shape:
        return None
    width, layers, kv_heads = (shape[f"{key}"] for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads"))
    kv_width = width // shape["num_attention_heads"] * kv_heads
    each = 2 * width * width + 2 * width * kv_width + 3 * width * shape["intermediate_size"]
    parameters = layers * each + width * shape["vocab_size"]
    cached = row["batch"] * (PROMPT + NEW / 2) * layers * 2 * kv_width
    steps = {side: speed / row["batch"] for side, speed in row["tokens_per_second"].items()}
    return {side: 2 * (parameters + cached) * step / peak for side, step in steps.items()}


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true", help="bfloat16 on a GPU")
    parser.add_argument("--shape", choices=SHAPES, help="one model instead of all; nothing is written")
    parser.add_argument("--batch", type=int, help="(with --shape) one batch instead of all")
    parser.add_argument("--side", help="(the script calls itself with this)")
    parser.add_argument("--folder", help="(and with this)")
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments.side, arguments.folder, arguments.gpu)
        return
    measured_on = machine("jax", "flax", "torch", "transformers")
    if arguments.gpu:
        measured_on["card"] = _card()
    plan, rows = ON_GPU if arguments.gpu else ON_CPU, []
    for shape in [arguments.shape] if arguments.shape else plan["shapes"]:
        batches = [arguments.batch] if arguments.batch else plan["batches"]
        for row in compare(shape, batches, plan["sides"], arguments.gpu):
            share = {"share_of_bandwidth": _share_of_bandwidth(row, measured_on["card"])} if arguments.gpu else {}
            rows.append(row | share)
            print(json.dumps(rows[-1]), flush=True)
            if not arguments.shape:
                figures = {"prompt_tokens": PROMPT, "new_tokens": NEW, "rounds": ROUNDS, "rows": rows}
                write_results("decode_gpu" if arguments.gpu else "decode", measured_on, figures)


if __name__ == "__main__":
    main()
