"""A process of the parity matrix: trains a model on some layouts of one number of devices, and writes what came out.

    python jobs.py FAMILY FOLDER DEVICES 'LAYOUT/ACCUMULATION' ...

A layout over several processes is started by `meshwright`'s own launcher code; see `train_as_one_of_several`.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import BATCH, BY_NAME, FAMILIES, STEPS, TIME, VOCAB, Layout
from helpers import QUICK


def make(family: str, layout: Layout, accumulate: int, **model):
    """The run of a case."""
    from meshwright.config import make_run

    return make_run(
        {
            "data": {"train": "x"},
            "model": {**FAMILIES[family], **model},
            "mesh": {"data": 1, **layout.mesh},
            "optimizer": {"clip_norm": 0.5},
            "train": {
                "steps": 100,
                "batch_size": BATCH,
                "micro_batch_size": BATCH // accumulate,
                "sequence_length": TIME,
                "scan_layers": (layout.name, accumulate) != ("data 2 x pipeline 2 x tensor 2", 2),  # one case unrolls
            },
        }
    )


def batch(step: int):
    """Ragged, random, and the same for every layout."""
    from meshwright.data.examples import Batch

    random = np.random.default_rng(step)
    tokens = random.integers(0, VOCAB, (BATCH, TIME + 1)).astype(np.int32)
    lengths = random.integers(2, TIME + 1, (BATCH, 1))
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), (np.arange(TIME) < lengths).astype(np.float32))


def make_engine(family: str, layout: Layout, accumulate: int, **model):
    """An engine whose optimizer keeps the gradients that it was given."""
    import jax
    import optax

    from meshwright.engines.jax.engine import JaxEngine

    keep = optax.GradientTransformation(
        lambda params: {"gradients": jax.tree.map(lambda leaf: leaf * 0, params)},
        lambda gradients, state, params=None: (gradients, {"gradients": gradients}),
    )
    # Adam's first step is g / (|g| + eps). With the usual 1e-8, an element whose gradient is all but zero makes a step
    # that rounding decides; with 1e-6 the parameters compare meshes, and not how Adam is conditioned.
    adamw = optax.adamw(1e-3, b2=0.95, eps=1e-6)
    run = make(family, layout, accumulate, **model)
    return JaxEngine(run, run.model.spec, optimizer=optax.chain(keep, adamw))


def tensors(engine, tree, names_and_axes: list[tuple[str, tuple]]) -> dict[str, np.ndarray]:
    """Parameters, or what is laid out as they are: layers in order, the vocabulary without padding."""
    import jax

    order_L = engine._program.state.order_L
    found = {}
    for (name, axes), leaf in zip(names_and_axes, jax.tree.leaves(tree), strict=True):
        value = np.asarray(leaf)
        if axes[0] == "layers" and order_L is not None:
            value = value[np.argsort(order_L)]
        found[name] = value[tuple(slice(0, VOCAB) if axis == "vocab" else slice(None) for axis in axes)]
    return found


def names_and_axes(engine) -> list[tuple[str, tuple]]:
    """Of each parameter."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(
        engine._program.state.axes, is_leaf=lambda value: isinstance(value, tuple)
    )[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), axes) for path, axes in leaves]


def train(family: str, layout: Layout, accumulate: int) -> dict[str, np.ndarray]:
    """Five steps: initial parameters, then loss, gradients and parameters of each, and facts about the layout."""
    engine = make_engine(family, layout, accumulate)
    whole, names = (
        engine._program.compiled(lambda tree: tree, out_shardings=engine._program.everywhere),
        names_and_axes(engine),
    )
    found = {}

    def add(step: int) -> None:
        kinds = whole({"param": engine._state.params, "gradient": engine._state.optimizer[0]["gradients"]})
        for kind, tree in kinds.items():
            found.update({f"{step}/{kind}/{name}": value for name, value in tensors(engine, tree, names).items()})

    add(0)
    for step in range(1, STEPS + 1):
        values = engine.train_step(mine(engine, step))
        found[f"{step}/loss"] = np.asarray(values["loss"], np.float64)
        add(step)
    if accumulate == 1:
        total, tokens = engine.eval_step(mine(engine, 0))
        found["eval"] = np.asarray(float(total) / float(tokens))
    found["layout"] = np.array(json.dumps(describe(engine)))
    return found


def mine(engine, step: int):
    """The rows of a step's batch that an engine needs."""
    whole = batch(step)
    return type(whole)(*(part[engine.rows] for part in whole[:3]))


def describe(engine) -> dict:
    """How the arrays really lie."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(engine._state.params)[0]
    devices = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {
        "shards": {name: list(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in devices.items()},
        "shapes": {name: list(leaf.shape) for name, leaf in devices.items()},
        "replicas differ": [name for name, leaf in devices.items() if not replicas_equal(leaf)],
        "rows": len(engine.rows),
        "batch": list(engine._program.mesh.place(mine(engine, 0)).inputs_BT.sharding.shard_shape((1, BATCH, TIME)))
        if engine._program.mesh.mesh is not None
        else [1, BATCH, TIME],
        "processes": jax.process_count(),
    }


def replicas_equal(leaf) -> bool:
    """Whether the shards that should hold the same do, bit for bit."""
    first: dict[str, np.ndarray] = {}
    for shard in leaf.addressable_shards:
        value = np.asarray(shard.data)
        if not np.array_equal(first.setdefault(str(shard.index), value), value):
            return False
    return True


def file_of(folder: Path, layout: Layout, accumulate: int) -> Path:
    """Where the result of a case goes."""
    return folder / f"{layout.name.replace(' ', '_').replace(':', '').replace(',', '')}-{accumulate}.npz"


def write(path: Path, found: dict[str, np.ndarray]) -> None:
    """Whole or not at all: others wait for the file."""
    with open(path.with_suffix(".partial"), "wb") as file:
        np.savez(file, **found)
    path.with_suffix(".partial").rename(path)


def main() -> None:
    family, folder, devices, *names = sys.argv[1:]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} {QUICK}"
    for name in names:
        layout, accumulate = BY_NAME[name.rpartition("/")[0]], int(name.rpartition("/")[2])
        write(file_of(Path(folder), layout, accumulate), train(family, layout, accumulate))


def train_as_one_of_several(group, family: str, folder: str, names: list[str]) -> bool:
    """The same in one of several processes."""
    for name in names:
        layout, accumulate = BY_NAME[name.rpartition("/")[0]], int(name.rpartition("/")[2])
        found = train(family, layout, accumulate)
        if group.is_primary:
            write(file_of(Path(folder), layout, accumulate), found)
    return True


if __name__ == "__main__":
    main()
