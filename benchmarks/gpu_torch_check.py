"""Whether the PyTorch engine computes on a GPU what it does without recorded kernels, and in bfloat16 what in float32.

    python benchmarks/gpu_torch_check.py     writes results/gpu_torch_check.json; ends with 1 where something is off

Small models of each dense family, random token ids, four steps in two micro-batches:

- in bfloat16 as it trains, with recorded kernels, and without: losses may differ by 1e-3;
- in bfloat16 and in float32: losses may differ by 2%;
- `train.deterministic`, twice: the losses are equal.

And one model that learns from pairs of answers (DPO), which are never recorded; its losses begin at log 2 and leave it.
"""

import json
import sys
import tempfile
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


PAIRS: dict[str, Any] = {"data": {"train": "x", "packing": "pairs"}, "lora": {"rank": 8, "alpha": 16.0}}


def losses(
    model: dict[str, Any], *, dtype: str, recorded: bool = True, deterministic: bool = False, pairs: bool = False
) -> list[float]:
    """Of four steps."""
    train = {"batch_size": 8, "micro_batch_size": 4, "sequence_length": 128, "compute_dtype": dtype}
    train |= {"deterministic": deterministic, "steps": 10}
    optimizer = {"learning_rate": 3e-3}
    values = {"engine": "torch", "data": {"train": "x"}, "model": model, "optimizer": optimizer, "train": train}
    run = meshwright.make_run(values | (PAIRS if pairs else {}))
    engine = TorchEngine(run, run.model.spec)
    if not recorded:
        engine._step._recorded = None
    found = []
    for step in range(4):
        ids = np.random.default_rng(step).integers(0, 1003, (8, 129), dtype=np.int32)
        batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((8, 128), np.float32))
        batch = side_by_side(batch) if pairs else batch
        found.append(float(engine.train_step(batch)["loss"]))
    return found


def write_llama(folder: str) -> None:
    """A small checkpoint of random weights, which adapters are added to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **sizes, intermediate_size=256, vocab_size=1003)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def side_by_side(batch: Batch) -> Batch:
    """A batch as one of pairs, each of two halves of a row; just the last quarter of a half is an answer."""
    place_T = np.arange(128) % 64
    segments_BT = np.broadcast_to(1 + np.arange(128) // 64, (8, 128)).astype(np.int32)
    weights_BT = np.broadcast_to((place_T >= 48) & (place_T < 63), (8, 128)).astype(np.float32)
    return batch._replace(
        weights_BT=weights_BT,
        segments_BT=segments_BT,
        positions_BT=np.broadcast_to(place_T, (8, 128)).astype(np.int32),
    )


def compared(model: dict[str, Any], pairs: bool) -> tuple[dict[str, Any], bool]:
    """What came out for a model, and whether it is as it should be."""
    fast = losses(model, dtype="bfloat16", pairs=pairs)
    plain = losses(model, dtype="bfloat16", recorded=False, pairs=pairs)
    exact = losses(model, dtype="float32", pairs=pairs)
    recorded, rounded = (float(max(np.abs(np.subtract(fast, other)))) for other in (plain, exact))
    learned = not pairs or abs(exact[0] - np.log(2)) < 1e-5 < abs(exact[-1] - exact[0])
    is_right = learned and recorded < 1e-3 and 0 < rounded < 0.02 * exact[0]
    return {"losses": fast, "recorded": recorded, "bfloat16": rounded}, is_right


def main() -> None:
    """Check, write the results, and say what is off."""
    measured_on = {
        **machine("torch", "transformers"),
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
    }
    rows: dict[str, Any] = {}
    off = []
    with tempfile.TemporaryDirectory() as folder:
        write_llama(folder)
        for name, model in {"llama, pairs": {"init": f"hf:{folder}"}, **FAMILIES}.items():
            try:
                rows[name], is_right = compared(model, name.endswith("pairs"))
            except Exception as error:
                rows[name], is_right = {"error": f"{type(error).__name__}: {error}"[:400]}, False
            off += [] if is_right else [name]
            print(name, json.dumps(rows[name]), flush=True)
            write_results("gpu_torch_check", measured_on, rows)
    # Last, as PyTorch stays deterministic from then on.
    twice = [losses(FAMILIES["llama"], dtype="bfloat16", deterministic=True) for _ in range(2)]
    rows["deterministic"] = {"equal": twice[0] == twice[1]}
    print(rows["deterministic"], flush=True)
    off += [] if twice[0] == twice[1] else ["deterministic"]
    write_results("gpu_torch_check", measured_on, rows)
    if off:
        sys.exit(f"off: {', '.join(off)}")


if __name__ == "__main__":
    main()
