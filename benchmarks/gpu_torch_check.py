"""Whether the PyTorch engine computes on a GPU what it does without recorded kernels, and in bfloat16 what in float32.

    python benchmarks/gpu_torch_check.py     writes results/gpu_torch_check.json; ends with 1 where something is off

Small models of each dense family, random token ids, four steps in two micro-batches:

- in bfloat16 as it trains, with recorded kernels, and without: losses may differ by 1e-3;
- in bfloat16 and in float32: losses may differ by 2%;
- `train.deterministic`, twice: the losses are equal.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from common import machine, write_results

import meshwright
from meshwright.data.examples import Batch
from meshwright.engines.torch.engine import TorchEngine

SIZES = {"vocab_size": 1003, "layers": 2, "width": 128, "heads": 4, "head_width": 32, "context_length": 256}
GATED = {**SIZES, "kv_heads": 2, "ffn_width": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZES, "preset": "gpt2-tiny", "ffn_width": 256},
    "llama": {**GATED, "preset": "llama-tiny"},
    "qwen2": {**GATED, "preset": "qwen2-tiny"},
    "qwen3": {**GATED, "preset": "qwen3-tiny"},
    "mistral": {**GATED, "preset": "mistral-tiny", "window": 64},
    "gemma2": {**GATED, "preset": "gemma2-tiny", "window": 64},
    "gemma3": {**GATED, "preset": "gemma3-tiny", "window": 64},
    "olmo2": {**GATED, "preset": "olmo2-tiny"},
}


def losses(model: dict[str, Any], *, dtype: str, recorded: bool = True, deterministic: bool = False) -> list[float]:
    """Of four steps."""
    train = {"batch_size": 8, "micro_batch_size": 4, "sequence_length": 128, "compute_dtype": dtype}
    train |= {"deterministic": deterministic, "steps": 10}
    optimizer = {"learning_rate": 3e-3}
    values = {"engine": "torch", "data": {"train": "x"}, "model": model, "optimizer": optimizer, "train": train}
    run = meshwright.make_run(values)
    engine = TorchEngine(run, run.model.spec)
    if not recorded:
        engine._step._recorded = None
    found = []
    for step in range(4):
        ids = np.random.default_rng(step).integers(0, 1003, (8, 129), dtype=np.int32)
        batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((8, 128), np.float32))
        found.append(float(engine.train_step(batch)["loss"]))
    return found


def main() -> None:
    """Check, write the results, and say what is off."""
    rows, off = {}, []
    for name, model in FAMILIES.items():
        try:
            fast = losses(model, dtype="bfloat16")
            plain = losses(model, dtype="bfloat16", recorded=False)
            exact = losses(model, dtype="float32")
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            off.append(name)
        else:
            away = {
                "recorded": max(np.abs(np.subtract(fast, plain))),
                "bfloat16": max(np.abs(np.subtract(fast, exact))),
            }
            rows[name] = {"losses": fast, **{key: float(value) for key, value in away.items()}}
            if not (away["recorded"] < 1e-3 and 0 < away["bfloat16"] < 0.02 * exact[0]):
                off.append(name)
        print(name, json.dumps(rows[name]), flush=True)
    twice = [losses(FAMILIES["llama"], dtype="bfloat16", deterministic=True) for _ in range(2)]
    rows["deterministic"] = {"equal": twice[0] == twice[1]}
    print(rows["deterministic"], flush=True)
    off += [] if twice[0] == twice[1] else ["deterministic"]
    measured_on = {
        **machine("torch", "transformers"),
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
    }
    write_results("gpu_torch_check", measured_on, rows)
    if off:
        sys.exit(f"off: {', '.join(off)}")


if __name__ == "__main__":
    main()
