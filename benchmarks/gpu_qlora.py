"""QLoRA on one GPU: whether it computes what LoRA does beside the same numbers, how fast it is, and what room it takes.

    python benchmarks/gpu_qlora.py     writes results/gpu_qlora.json after each part; ends with 1 where something is off

Random checkpoints, which it writes, and random token ids. Needs bitsandbytes. Parts, of which `--parts` takes some:

- `same`: small Llama and Qwen2, ten steps in two micro-batches. QLoRA beside LoRA on a checkpoint of what the 4 bits
  stand for: losses and gradient norms may differ by 1e-5 of themselves in float32, and losses by 1e-3 in bfloat16,
  compiled and recorded, where they may differ as much from those without recording; LoRA on the checkpoint itself must
  differ more. What an export would hold gives the scores of the model as it trains, both in float32, to 1e-3 of the
  largest.
- `resume`: five steps, saved after two and gone on with in another engine, `train.deterministic`: losses are equal.
- `speed`: the shape of Qwen2.5-0.5B, 8 rows of 512, bfloat16: full fine-tuning, LoRA and QLoRA, 20 steps each; the
  device is synchronised before and after. `start_gib` and `load_peak_gib` are what lies on the card before the first
  step, and the most that lay there until then.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, write_results

import meshwright
from meshwright.data.examples import Batch
from meshwright.engines.base import Sampling
from meshwright.engines.torch.engine import TorchEngine
from meshwright.hub.adapter import Base
from meshwright.hub.export import Parameters, write_model

SIZES = {"vocab_size": 1003, "layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "ffn_width": 512}
FAMILIES = {
    "llama": {"preset": "llama-tiny", **SIZES, "context_length": 256},
    "qwen2": {"preset": "qwen2-tiny", **SIZES, "context_length": 256},
}
LARGE = {"preset": "qwen2.5-0.5b", "vocab_size": 151936}
LORA, NF4 = {"rank": 16, "alpha": 32.0}, {"rank": 16, "alpha": 32.0, "quantize": "nf4"}
SIDES: dict[str, dict[str, Any]] = {"qlora": NF4, "lora": LORA, "full": {"rank": 0}}
ROWS, TIME, LARGE_ROWS, LARGE_TIME, WARM_UPS, STEPS = 8, 128, 8, 512, 5, 20


class _Louder:
    """Parameters with larger maps, so that what 4 bits change shows."""

    def __init__(self, parameters: Parameters):
        self._parameters, self.shapes = parameters, parameters.shapes

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """See `Parameters.read`."""
        return self._parameters.read(path, index) * np.float32(4 if path.endswith(".kernel") else 1)


def make_engine(
    model: dict[str, Any], lora: dict[str, Any], *, rows: int = ROWS, time: int = TIME, **train: Any
) -> TorchEngine:
    """An engine that trains."""
    torch._dynamo.reset()  # else it would give up after a few models
    values = {"engine": "torch", "data": {"train": "x"}, "model": model, "lora": lora}
    values |= {"optimizer": {"learning_rate": 1e-3}, "schedule": {"kind": "constant"}}
    values["train"] = {"steps": 100, "batch_size": rows, "sequence_length": time, **train}
    run = meshwright.make_run(values)
    return TorchEngine(run, run.model.spec)


def write_checkpoint(folder: Path, spec: Any, parameters: Parameters, dtype: str) -> dict[str, Any]:
    """Write a checkpoint, and give the section `[model]` that starts from it."""
    folder.mkdir()
    write_model(folder, spec, parameters, dtype=dtype, shard_bytes=10**10, tokens={})
    return {"init": f"hf:{folder}"}


def batches(vocabulary: int, rows: int, time: int) -> Callable[[int], Batch]:
    """Gives the batch of a step."""

    def batch(step: int) -> Batch:
        ids = np.random.default_rng(step).integers(0, vocabulary, (rows, time + 1), dtype=np.int32)
        return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((rows, time), np.float32))

    return batch


def losses(engine: TorchEngine, first: int = 0, last: int = 10) -> list[float]:
    """Of some steps; and each gradient's norm."""
    batch = batches(SIZES["vocab_size"], ROWS, TIME)
    steps = [engine.train_step(batch(step)) for step in range(first, last)]
    return [float(step[key]) for step in steps for key in ("loss", "grad_norm")]


def away(one: list[float], other: list[float]) -> float:
    """The largest difference, as a share."""
    return float(np.max(np.abs(np.subtract(one, other)) / np.abs(other)))


def scores_away(engine: TorchEngine) -> float:
    """How far the scores of what an export would hold are from those of the model that trains, as a share."""
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, TIME))
    with engine._placed.used() as module:
        module.eval()
        ours = module(module.scores, torch.from_numpy(ids).to(engine._placed.mesh.device)).cpu().numpy()
    exported = engine.logits(ids)
    return float(np.abs(ours - exported).max() / np.abs(exported).max())


def same(folder: Path) -> dict[str, Any]:
    """The first part; see above."""
    rows: dict[str, Any] = {}
    for name, model in FAMILIES.items():
        small = {"micro_batch_size": ROWS // 2}
        with torch.compiler.set_stance("force_eager"):
            random = make_engine(model, {"rank": 0}, **small)
            parameters = _Louder(random.on_host())
            init = write_checkpoint(folder / name, random._spec, parameters, "float32")
            quantized = make_engine(init, NF4, compute_dtype="float32", **small)
            base = Base(quantized.adapters_on_host())
            stands_for = write_checkpoint(folder / f"{name}-4-bits", quantized._spec, base, "float32")
            exact = losses(quantized)
            row = {"losses": exact[::2], "export": scores_away(quantized)}
            row["float32"] = away(exact, losses(make_engine(stands_for, LORA, compute_dtype="float32", **small)))
            row["whole"] = away(exact, losses(make_engine(init, LORA, compute_dtype="float32", **small)))
        fast = make_engine(init, NF4, **small)
        row["is_recorded"] = fast._step._recorded is not None
        found = losses(fast)
        other = losses(make_engine(stands_for, LORA, **small))
        row |= {"bfloat16": away(found[::2], other[::2]), "norms": away(found[1::2], other[1::2])}
        row["generated"] = [int(token) for (token,) in fast.generate([[1, 2, 3]], 4, -1, Sampling(temperature=0.0))]
        plain = make_engine(init, NF4, **small)
        plain._step._recorded = None
        row["recorded"] = away(found[::2], losses(plain)[::2])
        limits = {"float32": 1e-5, "bfloat16": 1e-3, "recorded": 1e-3, "export": 1e-3}
        row["off"] = [key for key, limit in limits.items() if not row[key] < limit]
        row["off"] += [] if row["whole"] > 10 * row["float32"] else ["whole"]
        rows[name] = row
        print("same", name, json.dumps(row), flush=True)
    return rows


def resume(folder: Path) -> dict[str, Any]:
    """The second part."""
    model, saved = {"init": f"hf:{folder / 'llama'}"}, folder / "saved"
    if not (folder / "llama").exists():
        random = make_engine(FAMILIES["llama"], {"rank": 0})
        write_checkpoint(folder / "llama", random._spec, _Louder(random.on_host()), "float32")
    unbroken = losses(make_engine(model, NF4, deterministic=True), 0, 5)
    first = make_engine(model, NF4, deterministic=True)
    found = losses(first, 0, 2)
    saved.mkdir()
    first.save(saved)()
    second = make_engine(model, NF4, deterministic=True)
    fresh = losses(make_engine(model, NF4, deterministic=True), 2, 5)
    second.restore(saved)
    found += losses(second, 2, 5)
    equal = found == unbroken and second.identity == first.identity
    row = {"unbroken": unbroken[::2], "gone_on": found[::2], "off": [] if equal and fresh != found[4:] else ["equal"]}
    print("resume", json.dumps(row), flush=True)
    return row


def sides(folder: Path, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The third part."""
    started = time.perf_counter()
    init = large_checkpoint(folder / "large")
    print(f"speed: checkpoint written in {time.perf_counter() - started:.1f} s", flush=True)
    rows: dict[str, Any] = {}
    for side, lora in SIDES.items():
        rows[side] = speed(init, lora)
        print("speed", side, json.dumps(rows[side]), flush=True)
        save(rows)
    return rows


def large_checkpoint(folder: Path) -> dict[str, Any]:
    """The shape of Qwen2.5-0.5B: noise of a small pool, which is quick to make."""
    from meshwright.engines.torch.build import skeleton, tensor_shapes
    from meshwright.engines.torch.names import Names

    run = meshwright.make_run({"engine": "torch", "data": {"train": "x"}, "model": LARGE})
    spec, pool = run.model.spec, np.random.default_rng(0).standard_normal(2**20, np.float32) * np.float32(0.02)

    class Noise:
        """See `Parameters`."""

        shapes = Names(spec, tensor_shapes(skeleton(spec))).ours

        def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
            """See `Parameters.read`."""
            shape = self.shapes[path][len(index) :]
            return np.ones(shape, np.float32) if path.endswith(".scale") else np.resize(pool, shape)

    return write_checkpoint(folder, spec, Noise(), "bfloat16")


def speed(init: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
    """Rates and room of one side."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    left, started = torch.cuda.memory_allocated(), time.perf_counter()
    engine = make_engine(init, lora, rows=LARGE_ROWS, time=LARGE_TIME)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"left_of_others_gib": left / 2**30, "load_s": time.perf_counter() - started}
    row |= {"start_gib": torch.cuda.memory_allocated() / 2**30}
    row |= {"load_peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    torch.cuda.reset_peak_memory_stats()
    batch = batches(LARGE["vocab_size"], LARGE_ROWS, LARGE_TIME)
    ready = [batch(step) for step in range(4)]
    started = time.perf_counter()
    for step in range(WARM_UPS):
        first = float(engine.train_step(ready[step % 4])["loss"])
    torch.cuda.synchronize()
    row["compile_s"] = time.perf_counter() - started
    started = time.perf_counter()
    for step in range(STEPS):
        last = engine.train_step(ready[step % 4])["loss"]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / STEPS
    row |= {"step_s": seconds, "tokens_per_s": LARGE_ROWS * LARGE_TIME / seconds, "losses": [first, float(last)]}
    return row | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "trained": engine.trained_parameters}


def main() -> None:
    """Do the parts, and say what is off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="same;speed;resume", help="some of them, with ';' between")
    chosen = parser.parse_args().parts.split(";")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    measured_on = {**machine("torch", "transformers", "bitsandbytes"), "card": card}
    results: dict[str, Any] = {}

    def save(part: str, rows: dict[str, Any]) -> None:
        results[part] = rows
        write_results("gpu_qlora", measured_on, results)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "same" in chosen:
            save("same", same(folder))
        if "speed" in chosen:
            sides(folder, lambda rows: save("speed", rows))
        if "resume" in chosen:
            with torch.compiler.set_stance("force_eager"):
                save("resume", resume(folder))
    off = [f"{name}: {row['off']}" for name, row in results.get("same", {}).items() if row["off"]]
    off += ["resume"] if results.get("resume", {}).get("off") else []
    if off:
        sys.exit(f"off: {'; '.join(off)}")


if __name__ == "__main__":
    main()
