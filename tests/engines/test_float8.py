"""Training in float8: on meshes as on one device, near bfloat16, and refused where it can't be."""

import json
import re
import sys
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import optax
import pytest
from virtual import measured_on_eight_devices

import meshwright as mw
from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.base import Sampling
from meshwright.engines.jax import program, step
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.program import Program
from meshwright.errors import UserError
from meshwright.models import float8
from meshwright.models.decoder import Decoder

LAYERS, MAPS, VOCAB, TIME, BATCH = 2, 7, 61, 16, 16
SMALL = {"preset": "llama-tiny", "layers": LAYERS, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8}
SMALL |= {"ffn_width": 64, "vocab_size": VOCAB, "context_length": TIME}
# Of each: the mesh, and how many sequences go through it at a time.
EXACTLY = {
    "tensor, by halves": ({"data": 4, "tensor": 2}, 8),
    "pipeline": ({"pipeline": 2, "fsdp": 2, "data": 2}, 8),
}
ROUGHLY = {
    "data": ({"data": 8}, 16),
    "fsdp": ({"fsdp": 4, "data": 2}, 16),
    "tensor, by halves": ({"data": 4, "tensor": 2}, 8),
}
VERGE = 2e-3
"""Gradients in float32 may differ by so much: sums of another order make the last bit, and of ten thousands of numbers
one or two may be on the verge between two of float8, which are 2^-3 apart."""
ROUNDED = 2**-5.5
"""And so much in bfloat16: where its rounding, of up to 2^-9, comes out otherwise, a share 2^-9 / 2^-3 of the numbers
goes to the next one of float8, 2^-3 off: by norm 2^-6, and sqrt(2) times that for two factors. Float8 itself changes
gradients by 2^-5."""
BFLOAT16 = 2e-3
"""Half a step of it: what a loss in bfloat16 may be off from one in float32, too (`test_step.py`)."""


def run_of(mesh: dict | None = None, **train):
    train = {"compute_dtype": "bfloat16", "float8": True, "batch_size": BATCH, "sequence_length": TIME, **train}
    values = {"data": {"train": "x"}, "model": SMALL, "mesh": {"data": 1, **(mesh or {})}, "train": train}
    return make_run(values)


def engine_of(mesh: dict | None = None, **train) -> JaxEngine:
    """An engine whose optimizer keeps the gradients that it was given."""
    keep = optax.GradientTransformation(
        lambda params: {"gradients": jax.tree.map(lambda leaf: leaf * 0, params)},
        lambda gradients, state, params=None: (gradients, {"gradients": gradients}),
    )
    run = run_of(mesh, **train)
    return JaxEngine(run, run.model.spec, optimizer=optax.chain(keep, optax.adam(1e-2)))


def batch(number: int) -> Batch:
    """Of tokens of which most follow from the one before."""
    random = np.random.default_rng(number)
    tokens = np.empty((BATCH, TIME + 1), np.int32)
    tokens[:, 0] = random.integers(0, VOCAB, BATCH)
    for place in range(TIME):
        guess = random.integers(0, VOCAB, BATCH)
        tokens[:, place + 1] = np.where(random.random(BATCH) < 0.8, (7 * tokens[:, place] + 3) % VOCAB, guess)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones((BATCH, TIME), np.float32))


def losses(engine: JaxEngine, steps: int, first: int = 0) -> list[float]:
    """Of some steps."""
    return [float(engine.train_step(batch(number))["loss"]) for number in range(first, first + steps)]


def gradient_of(engine: JaxEngine) -> list[float]:
    """All gradients of the blocks in the last step."""
    whole = engine._program.compiled(lambda tree: tree, out_shardings=engine._program.everywhere)
    leaves = jax.tree.leaves(whole(engine._state.optimizer[0]["gradients"]["blocks"]))
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).tolist()


def exactly(mesh: dict | None = None, *, on: bool = True, **train) -> list[float]:
    """Gradients where all but float8 is in float32, so that no other rounding hides what a mesh would change."""
    with patch.object(step, "uses_float8", lambda *_: on):
        engine = engine_of(mesh, compute_dtype="float32", float8=False, **train)
        losses(engine, 1)
    return gradient_of(engine)


def roughly(mesh: dict | None = None, **train) -> tuple[list[float], list[float]]:
    """As a run has it, in bfloat16: the gradients of the first step, and the losses of three."""
    engine = engine_of(mesh, **train)
    first = losses(engine, 1)
    return gradient_of(engine), first + losses(engine, 2, first=1)


def measure() -> dict[str, Any]:
    """Of each mesh."""
    return {
        "exact": {name: exactly(mesh, micro_batch_size=micro) for name, (mesh, micro) in EXACTLY.items()},
        "rough": {name: roughly(mesh, micro_batch_size=micro) for name, (mesh, micro) in ROUGHLY.items()},
    }


def gap(got: list[float], wanted: list[float]) -> float:
    """By norm."""
    return float(np.linalg.norm(np.subtract(got, wanted)) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def found():
    return measured_on_eight_devices(__file__)


@pytest.fixture(scope="module")
def one():
    """On one device."""
    return exactly()


def test_a_mesh_changes_nothing(found, one):
    for name, of_mesh in {**found["exact"], "by halves": exactly(micro_batch_size=8)}.items():
        assert gap(of_mesh, one) < VERGE, name
    assert gap(one, exactly(on=False)) > 10 * VERGE  # other scales would change it by as much


@pytest.mark.parametrize("how", [{"remat": "full"}, {"remat": "products", "scan_layers": True}])
def test_neither_does_what_is_computed_again(one, how):
    assert gap(exactly(**how), one) < VERGE


def test_a_mesh_changes_nothing_in_bfloat16(found):
    gradient, losses = roughly()
    for name, (of_mesh, losses_of_mesh) in {**found["rough"], "by halves": roughly(micro_batch_size=8)}.items():
        assert gap(of_mesh, gradient) < ROUNDED, name
        assert losses_of_mesh == pytest.approx(losses, rel=BFLOAT16), name
    # Kernels come in bfloat16 along fsdp, in float32 elsewhere: they are rounded to the same float8.
    assert gap(found["rough"]["fsdp"][0], found["rough"]["data"][0]) < 1e-6


def test_it_learns_as_bfloat16_does():
    """A product is off by some 4% of its norm, to no side, and a step's loss is made of very many: the curves may lie
    2% of what they fall apart."""
    rough, plain = (np.array(losses(engine_of(float8=on, scan_layers=True), 30)) for on in (True, False))
    fallen = plain[0] - plain[-1]
    assert fallen > 1
    assert 0 < np.abs(rough - plain).max() < 0.02 * fallen


def lowered(run) -> str:
    """The train step as a GPU's compiler gets it."""
    program = Program(run, run.model.spec, model=Decoder)
    traced = program.train_step._jitted.trace(program.state.shapes, program.mesh.abstract_batch(run), None)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_each_map_of_a_block_and_nothing_else():
    text = lowered(run_of())
    kernels = re.findall(r"dot_general.*: \(tensor<\S*xf8E4M3FN>, tensor<(\d+)x(\d+)xf8E4M3FN>\)", text)
    assert len(kernels) == text.count("xf8E4M3FN>, ") == 2 * MAPS * LAYERS  # forward, and the gradient of the input
    assert {tuple(map(int, kernel)) for kernel in kernels} == {(32, 32), (32, 16), (32, 64), (64, 32)}
    assert "f8E4M3FN" not in lowered(run_of(float8=False))


def test_losses_are_in_it_and_samples_and_exports_are_not(monkeypatch):
    called, linear = [], float8.linear
    monkeypatch.setattr(float8, "linear", lambda *of: called.append(of) or linear(*of))
    run = run_of()
    engine = JaxEngine(run, run.model.spec, training=False)
    assert "bfloat16, products in float8" in engine.description
    engine.eval_step(batch(0))
    assert len(called) == MAPS * LAYERS
    called.clear()
    engine.logits(batch(0).inputs_BT)
    list(engine.generate([[1, 2]], 3, -1, Sampling(0.0, 0, 1.0, 0)))
    assert not called


def test_it_is_refused_where_it_cannot_be(monkeypatch):
    with pytest.raises(UserError, match=r'train.float8 = true: needs .* "auto" is float32 on a cpu; set that to'):
        engine_of(compute_dtype="auto")
    monkeypatch.setattr(float8, "is_here", lambda: False)
    monkeypatch.setattr(program.kernels, "compute_capability", lambda: 8.0)
    with pytest.raises(UserError, match=r"train.float8 = true: needs GPUs of compute capability 8.9 .* is 8.0; leave"):
        engine_of()


@pytest.mark.parametrize(("here", "dtype"), [(False, "bfloat16"), (True, "auto")])
def test_a_trained_model_opens_there_without_it(monkeypatch, here, dtype):
    monkeypatch.setattr(float8, "is_here", lambda: here)
    (run, plain) = (run_of(compute_dtype=dtype, float8=on) for on in (True, False))
    loss, without = (JaxEngine(one, one.model.spec, training=False).eval_step(batch(0))[0] for one in (run, plain))
    assert float(loss) == float(without)


def test_a_plan_knows_it():
    """Nothing more is kept from forward to backward, and no kernels are joined."""
    plans = [mw.plan(run_of(float8=on), devices=1, compiled=False) for on in (True, False)]
    told = [re.search("computes in +(.*)", str(plan))[1] for plan in plans]
    assert told == ["bfloat16, products in float8", "bfloat16"]
    sizes, without = (plan.estimate for plan in plans)
    assert sizes.kernels == 0 < without.kernels
    assert sizes.total == without.total - without.kernels


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
