"""Processes of the PyTorch engine over gloo: what each of a list of cases does, whole, and written to files.

python torch_jobs.py FOLDER WORKERS RANK PORT PARENT 'FAMILY/LAYOUT' ...
"""

import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

VOCAB, BATCH, TIME, STEPS = 97, 8, 16, 5


class Layout(NamedTuple):
    """A mesh, and into how many micro-batches a batch is cut."""

    mesh: dict[str, int]
    accumulate: int = 1

    @property
    def workers(self) -> int:
        return int(np.prod(list(self.mesh.values())))


LAYOUTS = {
    "ddp 2": Layout({"data": 2}),
    "fsdp 2": Layout({"fsdp": 2}),
    "tensor 2": Layout({"tensor": 2}),
    "ddp 2, accumulation 2": Layout({"data": 2}, 2),
    "fsdp 2, accumulation 2": Layout({"fsdp": 2}, 2),
    "tensor 2, accumulation 2": Layout({"tensor": 2}, 2),
    "fsdp 4": Layout({"fsdp": 4}),
    "fsdp 2 x tensor 2": Layout({"fsdp": 2, "tensor": 2}),
    "ddp 2 x fsdp 2": Layout({"data": 2, "fsdp": 2}),
    "ddp 2 x tensor 2": Layout({"data": 2, "tensor": 2}, 2),
}
"""Those that each of `FAMILIES` is trained on."""
MORE_LAYOUTS = {"ddp 2 x fsdp 2 x tensor 2": Layout({"data": 2, "fsdp": 2, "tensor": 2}, 2)}
"""Those that one is trained on."""
_ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("llama", _ROTARY),
    "qwen2": ("qwen2", {**_ROTARY, "tie_word_embeddings": False}),
    "qwen2 tied": ("qwen2", {**_ROTARY, "tie_word_embeddings": True}),
}
"""Those that are trained on every layout."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**_ROTARY, "head_dim": 8}),
    "gemma3": ("gemma3_text", {**_ROTARY, "head_dim": 8, "sliding_window": 6}),
    "mixtral": ("mixtral", {**_ROTARY, "num_local_experts": 4}),
}
"""Those that are trained on one."""
RESTORED = [
    ("llama", "tensor 2", "from fsdp 4"),
    ("gpt2", "fsdp 2", "from fsdp 2 x tensor 2"),
    ("qwen2 tied", "ddp 2", "from ddp 2 x tensor 2"),
    ("llama", "ddp 2", "from fsdp 2"),
    ("qwen2", "fsdp 2", "from ddp 2"),
    ("gpt2", "tensor 2", "from ddp 2"),
]
"""Families, the layouts that go on, and those that they go on from."""
_SAVED = [f"{family}/{other.removeprefix('from ')}" for family, _, other in RESTORED]


def make_run(checkpoint: Path | str, layout: Layout, **sections: Any):
    """The run of a case."""
    import meshwright as mw

    values: dict[str, Any] = {
        "engine": "torch",
        "data": {"train": "x"},
        "model": {"init": f"hf:{checkpoint}", "dropout": 0.0},
        "mesh": {"data": 1, **layout.mesh},
        "optimizer": {"clip_norm": 0.5, "learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
        "train": {
            "steps": STEPS,
            "batch_size": BATCH,
            "micro_batch_size": BATCH // layout.accumulate,
            "sequence_length": TIME,
        },
    }
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section}
    return mw.make_run(values)


def layout_of(case: str) -> Layout:
    """That of `FAMILY/LAYOUT`."""
    return {**LAYOUTS, **MORE_LAYOUTS}[case.split("/")[1]]


def batch(step: int):
    """Ragged, random, and the same for every layout."""
    from meshwright.data.examples import Batch

    random = np.random.default_rng(step)
    tokens = random.integers(0, VOCAB, (BATCH, TIME + 1)).astype(np.int32)
    lengths = random.integers(2, TIME + 1, (BATCH, 1))
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), (np.arange(TIME) < lengths).astype(np.float32))


def rows_of(engine, whole):
    """This process's rows of a batch."""
    return type(whole)(*(None if part is None else part[engine.rows] for part in whole))


def make_engine(run):
    from meshwright.engines.torch.engine import TorchEngine

    return TorchEngine(run, run.model.spec)


def keep_gradients(engine) -> dict[str, np.ndarray]:
    """A dictionary into which each update puts the whole gradient, clipped."""
    kept: dict[str, np.ndarray] = {}
    update = engine._optimizer.step

    def step(shrink):
        factor = 1.0 if shrink is None else shrink
        gradients = engine._optimizer.gradients
        kept.update({name: whole(engine, name, part * factor) for name, part in gradients.items()})
        update(shrink)

    engine._optimizer.step = step
    return kept


def whole(engine, name: str, part) -> np.ndarray:
    """All of a tensor, where each process has a part of what lies as a parameter does; called by all."""
    from torch.distributed.tensor import DTensor

    like = engine._placed.parameters[name]
    if isinstance(like, DTensor):
        more = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        part = DTensor.from_local(part, like.device_mesh, like.placements, **more).full_tensor()
    return part.numpy().copy().reshape(engine._placed.names.theirs[name])


def parameters(engine) -> dict[str, np.ndarray]:
    from meshwright.engines.torch.plan import own

    return {name: whole(engine, name, own(tensor)) for name, tensor in engine._placed.parameters.items()}


def train(run, steps: int = STEPS) -> tuple[Any, dict[str, np.ndarray]]:
    """The engine, and its initial parameters, losses, gradient norms, gradients and final parameters."""
    engine = make_engine(run)
    found = {f"initial/{name}": value for name, value in parameters(engine).items()}
    kept, losses, norms = keep_gradients(engine), [], []
    for step in range(steps):
        values = engine.train_step(rows_of(engine, batch(step)))
        losses.append(float(values["loss"]))
        norms.append(float(values["grad_norm"]))
        found |= {f"gradient/{step}/{name}": value for name, value in kept.items()}
    found |= {f"final/{name}": value for name, value in parameters(engine).items()}
    total, tokens = engine.eval_step(rows_of(engine, batch(99)))
    found |= {"loss": np.array(losses), "norm": np.array(norms), "eval": np.array([float(total), float(tokens)])}
    found["rows"] = engine.rows
    return engine, found


def case_of(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Train a case, generate from it, and save what another goes on from."""
    from meshwright.engines.base import Sampling
    from meshwright.hub.reader import Checkpoint

    family, _ = name.split("/")
    read, original = [], Checkpoint.read

    def count(checkpoint, tensor, index=()):
        value = original(checkpoint, tensor, index)
        read.append(value.size)
        return value

    Checkpoint.read = count
    try:
        engine, found = train(make_run(folder / family, layout_of(name)))
    finally:
        Checkpoint.read = original
    found["read"] = np.array([sum(read), max(read), engine.parameters])
    texts = engine.generate([[1, 2, 3], [4]], 6, VOCAB, Sampling(seed=1))
    found["text"] = np.array(list(texts))
    if name in _SAVED:
        target = folder / f"state of {name.replace('/', ' on ')}"
        target.mkdir(exist_ok=True)
        saved = engine.save(target)
        engine.train_step(rows_of(engine, batch(0)))  # may go on at once
        saved()
    return found


def restored_case(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Go on from the state that another layout saved: `FAMILY/LAYOUT/from OTHER`."""
    family, _, other = name.split("/")
    run = make_run(folder / family, layout_of(name))
    engine = make_engine(run)
    engine.restore(folder / f"state of {family} on {other.removeprefix('from ')}")
    found = {f"initial/{name}": value for name, value in parameters(engine).items()}
    found["loss"] = np.array([float(engine.train_step(rows_of(engine, batch(STEPS + n)))["loss"]) for n in range(2)])
    return found


def start(folder: Path, workers: int, names: list[str], timeout: float = 500) -> None:
    """Run cases, one after another, in one group of processes; `folder` then holds `RANK NAME.npz` of each."""
    from meshwright.launch.processes import reserved_port

    with reserved_port() as port:
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(workers):
                place = [*map(str, (folder, workers, rank, port, os.getpid()))]
                with open(folder / f"{workers}-{rank}.log", "wb") as log:
                    command = [sys.executable, __file__, *place, *names]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            end = time.monotonic() + timeout
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                if any(p.poll() for p in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        logs = [(folder / f"{workers}-{rank}.log").read_text(errors="replace")[-6000:] for rank in range(workers)]
        assert not any(codes), "\n".join([f"exit codes {codes}", *logs])


def result(folder: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(folder / f"{rank} {name.replace('/', ' on ')}.npz") as file:
        return dict(file)


def main() -> None:
    from meshwright.launch.processes import end_with
    from meshwright.launch.torch_group import join, leave

    folder, workers, rank, port, parent, *names = sys.argv[1:]
    end_with(int(parent))
    group = join(int(port), int(rank), int(workers))
    for name in names:
        found = (case_of if name.count("/") == 1 else restored_case)(Path(folder), name)
        if int(rank) > 0:  # what is compared of the others
            found = {key: found[key] for key in ("loss", "text", "rows", "read") if key in found}
        np.savez(Path(folder, f"{rank} {name.replace('/', ' on ')}.npz"), **found)
    leave(group)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
