"""The PyTorch engine on one GPU: beside the step that tutorials teach, and beside the trainer of `transformers`.

    python benchmarks/gpu_torch.py                writes results/gpu_torch.json
    python benchmarks/gpu_torch.py --cases "…;…"  takes some of all: results/gpu_torch_some.json

The shape of Qwen2.5-0.5B with random weights, bfloat16, AdamW, clipping, random token ids over the whole vocabulary.
Each side of each case is a process of its own that has the card to itself; it compiles, and is timed over windows of
steps, the device synchronised before and after each: the median window counts. Sides:

- `ours`: the engine's step.
- `tutorial`: autocast over bfloat16 weights, AdamW with `foreach=False`, the loss read each step.
- `trainer`: `transformers.Trainer` as a whole, with SDPA, `torch_compile`, `bf16` and fused AdamW: the mean time of a
  step within one run, from the tenth on, the device synchronised at both ends.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import machine, write_results

VOCAB = 151936
CASES = {"1 x 512": (1, 512), "8 x 512": (8, 512), "8 x 2048": (8, 2048), "48 x 2048": (48, 2048)}
SIDES = {
    "1 x 512": ["ours", "tutorial"],
    "8 x 512": ["ours", "tutorial", "trainer"],
    "8 x 2048": ["ours", "trainer"],
    "48 x 2048": ["ours"],
}
STEPS, WINDOWS, TRAINER_STEPS = 10, 4, (10, 50)


def our_step(rows: int, time_: int) -> Callable[[np.ndarray], Any]:
    """The engine's."""
    import meshwright
    from meshwright.data.examples import Batch
    from meshwright.engines.torch.engine import TorchEngine

    run = meshwright.make_run(
        {
            "engine": "torch",
            "data": {"train": "x"},
            "model": {"preset": "qwen2.5-0.5b", "vocab_size": VOCAB},
            "train": {"batch_size": rows, "sequence_length": time_},
        }
    )
    engine, ones = TorchEngine(run, run.model.spec), np.ones((rows, time_), np.float32)
    return lambda ids: engine.train_step(Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), ones))["loss"]


def make_model(dtype: Any) -> Any:
    """Qwen2.5-0.5B of `transformers`, random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32768}
    config = AutoConfig.for_model("qwen2", **sizes, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def tutorial_step(_rows: int, _time: int, wrapped: Callable[[Any], Any] = lambda model: model) -> Callable:
    """The tutorial's; it reads each loss. On several cards the model is `wrapped`."""
    import torch

    model = wrapped(make_model(torch.bfloat16).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, foreach=False)

    def step(ids: np.ndarray) -> float:
        tokens = torch.from_numpy(ids).to("cuda", torch.long)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def trainer(rows: int, time_: int, ids: np.ndarray) -> dict[str, Any]:
    """The whole trainer: what its steps take once all is compiled."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    first, last = TRAINER_STEPS
    marks: dict[int, float] = {}

    class Clock(TrainerCallback):
        """Marks the time after two of the steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in TRAINER_STEPS:
                torch.cuda.synchronize()
                marks[state.global_step] = time.perf_counter()

    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in ids.astype(np.int64).reshape(-1, time_ + 1)] * 200
    settings = {
        "optim": "adamw_torch_fused",
        "bf16": True,
        "torch_compile": True,
        "max_steps": last,
        "logging_steps": 10,
    }
    settings |= {"report_to": "none", "save_strategy": "no", "dataloader_num_workers": 2, "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=rows, **settings)
        done = Trainer(make_model(torch.float32), arguments, train_dataset=data, callbacks=[Clock()]).train()
    return {"step_s": (marks[last] - marks[first]) / (last - first), "last_loss": done.training_loss}


def timed(step: Callable[[np.ndarray], Any], ids: np.ndarray) -> dict[str, Any]:
    """Seconds of a step: the median over windows, and the extremes."""
    first = float(step(ids[0]))
    for batch in ids:
        last = float(step(batch))
    windows = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for number in range(STEPS):
            loss = step(ids[number % len(ids)])
        last = float(loss)
        windows.append((time.perf_counter() - start) / STEPS)
    extremes = {"fastest_s": min(windows), "slowest_s": max(windows)}
    return {"step_s": statistics.median(windows), **extremes, "first_loss": first, "last_loss": last}


def work(side: str, name: str) -> dict[str, Any]:
    """One side of one case, in a process of its own."""
    import torch

    rows, time_ = CASES[name]
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, rows, time_ + 1), dtype=np.int32)
    started = time.perf_counter()
    if side == "trainer":
        row = trainer(rows, time_, ids)
    else:
        row = timed({"ours": our_step, "tutorial": tutorial_step}[side](rows, time_), ids)
    seconds = time.perf_counter() - started
    return row | {"whole_s": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def with_rates(name: str, row: dict[str, Any], card: str) -> dict[str, Any]:
    """A side's figures, and what follows from them."""
    from meshwright.engines.flops import training_flops
    from meshwright.engines.peaks import peak_flops
    from meshwright.models.spec import preset

    if "step_s" not in row:
        return row
    rows, time_ = CASES[name]
    spec = preset("qwen2.5-0.5b").model_copy(update={"vocab_size": VOCAB})
    speed, parameters = rows * time_ / row["step_s"], 494_032_768
    peak = peak_flops(card)
    mfu = {"mfu": training_flops(spec, parameters, time_) * speed / peak} if peak else {}
    return row | {"tokens_per_s": speed, **mfu}


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", help="some of them, with ';' between")
    parser.add_argument("--side", help="(the script calls itself with this)")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(work(arguments.side, arguments.cases)))
        return
    code = "import torch; print(torch.cuda.get_device_name(0))"
    card = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    measured_on = {**machine("torch", "transformers"), "card": card}
    names = arguments.cases.split(";") if arguments.cases else list(CASES)
    results: dict[str, Any] = {name: {"rows": CASES[name][0], "time": CASES[name][1]} for name in names}
    for name in names:
        for side in SIDES[name]:
            command = [sys.executable, __file__, "--side", side, "--cases", name]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = done.stdout.splitlines()
            row = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}
            results[name][side] = with_rates(name, row, card)
            print(name, side, results[name][side], flush=True)
            # Some cases never take the place of the file with all.
            write_results("gpu_torch_some" if arguments.cases else "gpu_torch", measured_on, {"cases": results})


if __name__ == "__main__":
    main()
