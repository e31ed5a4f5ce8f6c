"""The kernels for GPUs on a mesh, interpreted on virtual devices: each device runs them on its own examples."""

import json
import re
import sys
from unittest.mock import patch

import jax
import numpy as np
from virtual import measured_on_eight_devices

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.models import flash, kernels
from meshwright.models.layout import layout

ATTENDING = [{"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}, {"fsdp": 4, "pipeline": 2}]
SENT = re.compile(r"stablehlo\.(all_gather|all_reduce|reduce_scatter)\"(?s:.)*?-> tensor<([0-9x]*300x(?:f32|bf16))>")
MESHES = [{"data": 2, "fsdp": 4}, {"data": 2, "tensor": 2, "context": 2}]


def engine_on(mesh: dict[str, int], dtype: str = "auto") -> JaxEngine:
    """An engine of a small GPT-2."""
    run = make_run(
        {
            "data": {"train": "none"},
            "model": {"preset": "gpt2-tiny", "layers": 2, "width": 64, "vocab_size": 300, "context_length": 32},
            "mesh": {"data": 1, **mesh},
            "train": {"batch_size": 16, "micro_batch_size": 8, "sequence_length": 32, "compute_dtype": dtype},
        }
    )
    return JaxEngine(run, run.model.spec)


def losses(mesh: dict[str, int]) -> list[float]:
    """Of three steps."""
    engine, found = engine_on(mesh), []
    tokens = np.random.default_rng(0).integers(0, 300, (16, 33)).astype(np.int32)
    weights = np.random.default_rng(1).integers(0, 2, (16, 32)).astype(np.float32)
    for _ in range(3):
        values = engine.train_step(Batch(tokens[:, :-1], tokens[:, 1:], weights))
        found += [float(values["loss"]), float(values["grad_norm"])]
    return found


def fused_attention() -> tuple[list[list[float]], list[str]]:
    """Losses and gradient norms where each device calls a kernel for attention, and the kinds of axes there."""
    kinds: set[str] = set()

    def kernel(q, k, v, mask, window, scale):
        kinds.update(kind.name for kind in jax.sharding.get_abstract_mesh().axis_types)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=scale, implementation="xla")

    with patch.object(flash, "applies", lambda *_: True), patch.object(flash, "_kernel", kernel):
        return [losses(mesh) for mesh in ATTENDING], sorted(kinds)


def sent_for_the_head() -> list[str]:
    """What devices do with arrays that have an axis of the vocabulary, and of what type these are."""
    engine = engine_on({"data": 2, "fsdp": 4}, "bfloat16")
    step, state = engine._program.train_step, engine._program.state
    with step._mesh.active():
        shapes = (state.shapes, step._mesh.abstract_batch(engine._program.run), step._mesh.to_agree_on(0))
        text = step._jitted.lower(*shapes).as_text()
    return sorted(" ".join(found) for found in set(SENT.findall(text)))


def measure() -> dict[str, list]:
    """Losses and gradient norms, and what each kernel was given, with the kernels and without."""
    found, given, call = {"without": [losses(mesh) for mesh in MESHES]}, [], kernels.call
    found["attention without"] = [losses(mesh) for mesh in ATTENDING]
    found["attention with"], found["kinds of axes"] = fused_attention()

    def watched(kernel, grid, shapes, *arrays, **more):
        given.append([kernel.func.__name__, *arrays[-1].shape])
        return call(kernel, grid, shapes, *arrays, **more)

    kernels.call, kernels.applies = watched, lambda x: layout().rows_are_whole(x.shape[0])
    found["with"], found["given"] = [], []
    for mesh in MESHES:
        given.clear()
        found["with"].append(losses(mesh))
        found["given"].append(sorted({tuple(entry) for entry in given}))
    found["sent"] = sent_for_the_head()
    return found


def test_they_change_nothing_and_see_one_devices_examples():
    found = measured_on_eight_devices(__file__)
    np.testing.assert_allclose(found["with"], found["without"], rtol=1e-5)
    names = {entry[0] for entry in found["given"][0]}
    assert names == {"_norm_backward", "_gelu", "_gelu_backward", "_cross_entropy"}
    rows = {entry[1] for entry in found["given"][0] if entry[0] != "_cross_entropy"}
    assert rows == {32}  # of 8 examples of 32 tokens on 8 devices
    assert found["given"][1] == []  # examples aren't whole there
    # Rounded on the way there; summed in float32 on the way back, and each gets what it stores.
    assert found["sent"] == ["all_gather 64x300xbf16", "all_reduce 16x300xf32", "reduce_scatter 16x300xf32"]
    np.testing.assert_allclose(found["attention with"], found["attention without"], rtol=1e-5)
    assert found["kinds of axes"] == ["Manual"]  # XLA crashes on cuDNN's calls where it has any axis to itself


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
