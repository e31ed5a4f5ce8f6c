"""Whether the fast paths of a GPU compute what the plain ones do, and whether a deterministic run is one.

    python benchmarks/gpu_check.py      writes results/gpu_check.json; ends with 1 where something is off
    python benchmarks/gpu_check.py --checks "…;…"     some of all: results/gpu_check_some.json

The file is written after each case, so that a run that is cut has left what it found. Five checks, on one NVIDIA GPU:

- gradients of small models in bfloat16, with the fast paths and without, against float32 without: the norm of the
  difference of all gradients as a share of their norm. With the fast paths it may be a tenth larger than without. The
  gradient of the keys' bias is told apart: it is zero but for rounding, whatever the rest.
- 300 steps on Python sources, with and without: the means of the last 50 losses may differ by 0.02.
- the same steps in bfloat16 and with `train.float8`: the means of the last 50 losses may differ by 0.02; and means of
  ten do somewhere, or it wasn't float8.
- `meshwright train` with `train.deterministic`, twice, one of the two killed and started again: all losses are equal;
  and twice without it, where they aren't.
- decode: scores of tokens that go through a model one by one, in bfloat16 with the kernels for that and without,
  against those of whole texts in float32, by norm. With them they may be off by a tenth more than without.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import card, machine, write_results

SMALL = {"layers": 2, "width": 256, "heads": 4, "context_length": 512, "vocab_size": 1003}
LLAMA = {**SMALL, "preset": "llama-tiny", "kv_heads": 2, "head_width": 64, "ffn_width": 512}
LATENT = {**SMALL, "preset": "deepseek-tiny", "head_width": 64, "rotary_width": 32, "ffn_width": 512, "experts": 0}
LATENT |= {"shared_experts": 0, "kv_latent": 128, "query_latent": 128}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**SMALL, "preset": "gpt2-tiny", "ffn_width": 1024},
    "llama": LLAMA,
    "llama, documents side by side": LLAMA,
    "llama, windows": {**LLAMA, "window": 64, "global_every": 2},
    "latent attention": LATENT,
}
TEXT_MODELS = ("gpt2-mini", "llama-mini")
TEXT_STEPS = 300
STEPS, KILLED_AT = 60, 35
EXACT = {"xla_gpu_autotune_level": 0}  # in float32 the search for the fastest products would take minutes
DECODED = 100, 300  # the places of the tokens that go one by one
DECODED_MODELS = [("llama-1b", 1), ("llama-1b", 32), ("gpt2", 5), ("qwen2.5-0.5b", 5), ("qwen3-0.6b", 5)]
Cases = Iterator[tuple[str, Any]]  # of a check: each with its figures
RUN_FILE = """
run_dir = "{folder}/{name}"
[data]
train = "python-stdlib"
store = "{folder}/store"
[tokenizer]
kind = "bytes"
[model]
preset = "gpt2-mini"
[train]
steps = {steps}
batch_size = 16
sequence_length = 512
scan_layers = true
log_every = 1
eval_every = 0
sample_every = 0
deterministic = {deterministic}
compile_cache = "off"
[checkpoint]
every = 20
"""


@contextmanager
def plain_paths() -> Iterator[None]:
    """Without fused attention and without kernels."""
    from meshwright.models import flash, kernels, one_token

    with ExitStack() as off:
        for module in (flash, kernels, one_token):
            off.enter_context(patch.object(module, "applies", lambda *_: False))
        yield


def gradients(model: dict[str, Any], dtype: str, documents: bool) -> tuple[np.ndarray, np.ndarray]:
    """All gradients of one batch, one after another, and that of the keys' bias, which isn't among them."""
    import jax

    from meshwright.config import make_run
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.program import Program
    from meshwright.engines.jax.step import make_loss
    from meshwright.models.decoder import Decoder

    train = {"batch_size": 4, "sequence_length": 512, "compute_dtype": dtype}
    run = make_run({"data": {"train": "none"}, "model": model, "train": train})
    program = Program(run, run.model.spec, model=Decoder)
    loss_sum = make_loss(program.state.graph, run, run.model.spec, program.mesh, program.dtype)
    random = np.random.default_rng(0)
    tokens = random.integers(0, model["vocab_size"], (1, 4, 513), dtype=np.int32)
    weights = random.integers(0, 2, (1, 4, 512)).astype(np.float32)
    segments = np.sort(random.integers(0, 4, (1, 4, 512)), axis=-1).astype(np.int32) if documents else None
    batch = Batch(tokens[..., :-1], tokens[..., 1:], weights, segments)
    options = EXACT if dtype == "float32" else {}
    gradient = jax.jit(jax.grad(lambda params, batch: loss_sum(params, batch).total), compiler_options=options)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        found = gradient(program.make_state().params, batch)
    parts: dict[bool, list[np.ndarray]] = {True: [np.empty(0)], False: []}
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        parts["['key']['bias']" in jax.tree_util.keystr(path)].append(np.ravel(leaf))
    return np.concatenate(parts[False]).astype(np.float64), np.concatenate(parts[True]).astype(np.float64)


def gradient_errors() -> Cases:
    """For each model, how far its gradients are off, with the fast paths and without."""
    for name, model in MODELS.items():
        documents = "documents" in name
        with plain_paths():
            (exact, _), (plain, plain_bias) = (gradients(model, one, documents) for one in ("float32", "bfloat16"))
        fast, fast_bias = gradients(model, "bfloat16", documents)
        size = np.linalg.norm(exact)
        figures = {
            "fast": float(np.linalg.norm(fast - exact) / size),
            "plain": float(np.linalg.norm(plain - exact) / size),
            "between": float(np.linalg.norm(fast - plain) / size),
            "bias_of_keys_fast": float(np.linalg.norm(fast_bias) / size),
            "bias_of_keys_plain": float(np.linalg.norm(plain_bias) / size),
        }
        yield name, figures


@cache
def stdlib_bytes() -> np.ndarray:
    """Python's sources as token ids."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\0".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)


def text_losses(preset: str, *, float8: bool = False) -> np.ndarray:
    """Losses of 300 steps on Python's sources."""
    from meshwright.config import make_run
    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    train = {"steps": TEXT_STEPS, "batch_size": 16, "sequence_length": 512, "compute_dtype": "bfloat16"}
    train |= {"float8": float8}
    model = {"preset": preset, "vocab_size": 257, "context_length": 512}
    schedule = {"warmup_steps": TEXT_STEPS // 10}
    run = make_run({"data": {"train": "none"}, "model": model, "schedule": schedule, "train": train})
    engine, random, losses = JaxEngine(run, run.model.spec), np.random.default_rng(0), []
    text, weights = stdlib_bytes(), np.ones((16, 512), np.float32)
    for _ in range(TEXT_STEPS):
        starts = random.integers(0, len(text) - 513, 16)
        rows = np.stack([text[start : start + 513] for start in starts])
        losses.append(engine.train_step(Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), weights))["loss"])
    return np.array([float(loss) for loss in losses])


def losses_on_text() -> Cases:
    """For each model, the ends of both curves and how they differ."""
    for preset in TEXT_MODELS:
        fast = text_losses(preset)
        with plain_paths():
            plain = text_losses(preset)
        figures = {
            "fast_last_50": float(fast[-50:].mean()),
            "plain_last_50": float(plain[-50:].mean()),
            "mean_difference": float(np.abs(fast - plain).mean()),
            "largest_difference": float(np.abs(fast - plain).max()),
        }
        yield preset, figures


def losses_in_float8() -> Cases:
    """For each model, the ends of its curves in bfloat16 and in float8, and how they differ."""
    for preset in TEXT_MODELS:
        curves = {"bfloat16": text_losses(preset), "float8": text_losses(preset, float8=True)}
        tens = [losses.reshape(-1, 10).mean(axis=1) for losses in curves.values()]
        figures = {
            **{f"{name}_last_50": float(losses[-50:].mean()) for name, losses in curves.items()},
            "largest_difference_of_tens": float(np.abs(tens[0] - tens[1]).max()),
        }
        yield preset, figures


def decode_errors() -> Cases:
    """For each model and batch, how far scores are off where tokens go one by one after a prompt."""
    for preset, texts in DECODED_MODELS:
        with plain_paths():
            exact, plain = (token_scores(preset, texts, one) for one in ("float32", "bfloat16"))
        fast, size = token_scores(preset, texts, "bfloat16"), np.linalg.norm(exact)
        figures = {
            "fast": float(np.linalg.norm(fast - exact) / size),
            "plain": float(np.linalg.norm(plain - exact) / size),
            "between": float(np.linalg.norm(fast - plain) / size),
        }
        yield f"{preset}, {texts} texts", figures


def token_scores(preset: str, texts: int, dtype: str) -> np.ndarray:
    """Scores of the places after the prompts, of random tokens: of whole texts in float32, else one by one."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from meshwright.models import spec as specs
    from meshwright.models.decoder import Decoder

    sizes = {"layers": 4, "vocab_size": 1003, "context_length": 512}
    spec = specs.preset(preset).model_copy(update=sizes)
    model = nnx.jit(lambda: Decoder(spec, rngs=nnx.Rngs(0)))()
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 1003, (texts, DECODED[1])))
    places_BT = jnp.broadcast_to(jnp.arange(DECODED[1]), tokens_BT.shape)
    if dtype == "float32":
        whole = jax.jit(lambda model: model(tokens_BT), compiler_options=EXACT)
        with jax.default_matmul_precision("highest"):
            return np.asarray(whole(model)[:, DECODED[0] :], np.float64)

    @jax.jit
    def one_by_one(model: Decoder) -> jax.Array:
        cache = model.empty_cache(texts, DECODED[1], jnp.dtype(dtype))
        prompt = slice(None), slice(DECODED[0])
        _, cache = model.decode(tokens_BT[prompt], places_BT[prompt], cache, dtype=jnp.dtype(dtype))

        def one(cache: Any, place: jax.Array) -> tuple[Any, jax.Array]:
            token_B1, place_B1 = (jax.lax.dynamic_slice_in_dim(all_, place, 1, 1) for all_ in (tokens_BT, places_BT))
            x_B1D, cache = model.decode(token_B1, place_B1, cache, dtype=jnp.dtype(dtype))
            return cache, model.logits(x_B1D)[:, 0].astype(jnp.float32)

        return jax.lax.scan(one, cache, jnp.arange(*DECODED))[1].swapaxes(0, 1)

    return np.asarray(one_by_one(model), np.float64)


def start(command: str, run_file: Path, platform: dict[str, str] | None = None) -> subprocess.Popen:
    """`meshwright` as a process of its own, which takes a small part of the card's memory."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1", **(platform or {})}
    arguments = [sys.executable, "-c", "from meshwright.cli import main; main()", command, str(run_file)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)


def deterministic_runs() -> Cases:
    """Losses of two runs that should be equal, of which one was killed, and of two that needn't be."""
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name in ("whole", "killed", "free", "free too"):
            files[name] = Path(folder) / f"{name.replace(' ', '-')}.toml"
            flag = str(not name.startswith("free")).lower()
            values = {"folder": folder, "name": files[name].stem, "steps": STEPS, "deterministic": flag}
            files[name].write_text(RUN_FILE.format(**values))
        prepared = start("prepare", files["whole"], {"JAX_PLATFORMS": "cpu"}).wait(timeout=300)
        assert prepared == 0, prepared
        processes = {name: start("train", file) for name, file in files.items()}

        def losses(name: str) -> list[float]:
            log = Path(folder) / files[name].stem / "metrics.jsonl"
            return [json.loads(line)["loss"] for line in log.read_text().splitlines()] if log.exists() else []

        while len(losses("killed")) < KILLED_AT and processes["killed"].poll() is None:
            time.sleep(0.02)
        processes["killed"].send_signal(signal.SIGKILL)
        code, reached = processes["killed"].wait(timeout=60), len(losses("killed"))
        processes["killed"] = start("train", files["killed"])
        codes = [process.wait(timeout=300) for process in processes.values()]
        found = {name: losses(name) for name in files}
    yield "killed_at", reached
    yield "was_killed", code == -signal.SIGKILL and not any(codes)
    yield "equal", found["whole"] == found["killed"] and len(found["whole"]) == STEPS
    yield "equal_without", found["free"] == found["free too"]


def off(name: str, found: dict[str, Any]) -> list[str]:
    """What isn't as it should be of a check's results."""
    if name == "deterministic":
        return [] if found["was_killed"] and found["equal"] and not found["equal_without"] else [name]
    if name == "text":
        return [model for model, t in found.items() if not abs(t["fast_last_50"] - t["plain_last_50"]) < 0.02]
    if name == "float8":
        gaps = {model: abs(t["float8_last_50"] - t["bfloat16_last_50"]) for model, t in found.items()}
        return [model for model, t in found.items() if not (gaps[model] < 0.02 and t["largest_difference_of_tens"] > 0)]
    return [model for model, e in found.items() if not (e["fast"] < 1.1 * e["plain"] and e["between"] > 0)]


CHECKS: dict[str, Callable[[], Cases]] = {
    "deterministic": deterministic_runs,  # first: the others have this process take most of the card's memory
    "gradients": gradient_errors,
    "text": losses_on_text,
    "float8": losses_in_float8,
    "decode": decode_errors,
}


def main() -> None:
    """Check, write the results, and say what is off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", default=";".join(CHECKS), help="some of them, with ';' between")
    wanted = parser.parse_args().checks.split(";")
    if unknown := set(wanted) - set(CHECKS):
        parser.error(f"--checks {', '.join(sorted(unknown))}: there are {', '.join(CHECKS)}")
    measured_on = {**machine("jax", "flax", "optax"), "card": card()}
    found: dict[str, dict[str, Any]] = {}
    for name, check in CHECKS.items():
        for case, figures in check() if name in wanted else ():
            found.setdefault(name, {})[case] = figures
            print(name, case, figures, flush=True)
            write_results("gpu_check" if wanted == list(CHECKS) else "gpu_check_some", measured_on, found)
    wrong = [one for name, of_check in found.items() for one in off(name, of_check)]
    if wrong:
        sys.exit(f"off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
