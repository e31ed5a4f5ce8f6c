"""The products of experts for GPUs on a mesh, interpreted on virtual devices: each device makes those of its rows."""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
from virtual import measured_on_eight_devices

from meshwright.config import Run, make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.program import Program
from meshwright.models import grouped
from meshwright.models.decoder import Decoder
from meshwright.models.grouped import BLOCK

EXPERTS, CHOICES, WIDTH, INNER, TIME, BATCH = 4, 2, 128, 256, 128, 16
MESHES = [{"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "tensor": 2, "expert": 2}]


def run_on(mesh: dict[str, int]) -> Run:
    """Of one layer; a device has rows enough to fill a block of each of its experts."""
    model = {"preset": "moe-tiny", "layers": 1, "width": WIDTH, "ffn_width": INNER, "heads": 2, "kv_heads": 2}
    experts = {"experts": EXPERTS, "experts_per_token": CHOICES}
    return make_run(
        {
            "data": {"train": "none"},
            "model": {**model, **experts, "head_width": 64, "vocab_size": 300, "context_length": TIME},
            "mesh": {"data": 1, **mesh},
            "train": {"batch_size": BATCH, "sequence_length": TIME},
        }
    )


def losses(mesh: dict[str, int]) -> list[float]:
    """Of two steps, and the norms of their gradients."""
    run = run_on(mesh)
    engine, found = JaxEngine(run, run.model.spec), []
    tokens = np.random.default_rng(0).integers(0, 300, (BATCH, TIME + 1)).astype(np.int32)
    for _ in range(2):
        values = engine.train_step(Batch(tokens[:, :-1], tokens[:, 1:], np.ones((BATCH, TIME), np.float32)))
        found += [float(values["loss"]), float(values["grad_norm"])]
    return found


def applied_to_rows_of_all_devices() -> bool:
    """Whether they would be used where XLA cuts the arrays, which it can't for kernels that aren't its own."""
    run, seen = run_on(MESHES[0]), []
    rows, up = jnp.zeros((BATCH * TIME * CHOICES, WIDTH)), jnp.zeros((EXPERTS, WIDTH, INNER))
    Program(run, run.model.spec, model=Decoder).compiled(lambda *x: seen.append(grouped.applies(*x)))(rows, up)
    return seen[0]


def measure() -> dict[str, Any]:
    """Losses and gradient norms with the kernels and without, and for each mesh the products that a device makes."""
    found: dict[str, Any] = {"without": [losses(mesh) for mesh in MESHES], "with": [], "given": []}
    given, call = set(), grouped.call

    def watched(kernel, grid, shape, numbers, *arrays, **more):
        given.add((kernel.func.__name__, *(tuple(array.shape) for array in arrays)))
        return call(kernel, grid, shape, numbers, *arrays, **more)

    hopper = patch.object(grouped, "kernels_for_gpus", SimpleNamespace(capability=lambda: 9.0))
    with hopper, patch.object(grouped, "_TYPES", (jnp.float32,)), patch.object(grouped, "call", watched):
        for mesh in MESHES:
            given.clear()
            found["with"].append(losses(mesh))
            found["given"].append(sorted(given))
        found["to rows of all devices"] = applied_to_rows_of_all_devices()
    return found


def products(rows: int, experts: int, inner: int) -> set[str]:
    """What a device makes of that many rows, with experts of that inner width."""
    slots = rows + experts * BLOCK
    x, h, inward, outward = [slots, WIDTH], [slots, inner], [experts, WIDTH, inner], [experts, inner, WIDTH]
    forward = [["_by_kernels", x, inward], ["_by_kernels", h, outward]]
    backward = [["_by_kernels", x, outward], ["_by_kernels", h, h, inward, inward]]
    return {json.dumps(one) for one in [*forward, *backward, ["_over_rows", x, h], ["_over_rows", h, x]]}


def test_they_change_nothing_and_see_one_devices_rows():
    found = measured_on_eight_devices(__file__)
    np.testing.assert_allclose(found["with"], found["without"], rtol=1e-5)
    given = [{json.dumps(one) for one in of_mesh} for of_mesh in found["given"]]
    rows = BATCH * TIME * CHOICES // 8
    # Where experts are shared, a device has room for all the rows of its partner; where inner widths are, both have the
    # same rows.
    assert given == [
        products(rows, EXPERTS, INNER),
        products(2 * rows, EXPERTS // 2, INNER),
        products(4 * rows, EXPERTS // 2, INNER // 2),
    ]
    assert not found["to rows of all devices"]


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
