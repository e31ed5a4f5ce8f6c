"""A researcher's own optimizer and metrics find the layers in order, also where a pipeline of several rounds doesn't
store them so.

This file runs itself as a script on eight virtual devices, once.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import run_values
from virtual import measured_on_eight_devices

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine

MESHES = {
    "data 8": {"data": 8},
    "pipeline 2": {"data": 4, "pipeline": 2},
    "pipeline 2, two rounds": {"data": 4, "pipeline": 2, "pipeline_rounds": 2},
}
LAYERS, VOCAB = 4, 61


def batch(seed: int) -> Batch:
    draw = np.random.default_rng(seed).integers
    inputs, targets = draw(0, VOCAB, (2, 16, 32), dtype=np.int32)
    return Batch(inputs, targets, np.ones((16, 32), np.float32))


def halved_by_layer() -> optax.GradientTransformation:
    """Momentum, with a rate that each layer has half of the one before it."""

    def scale(updates, _):
        rates_L = 0.5 ** jnp.arange(LAYERS)
        blocks = jax.tree.map(lambda u: u * rates_L.reshape(-1, *[1] * (u.ndim - 1)), updates["blocks"])
        return {**updates, "blocks": blocks}

    return optax.chain(optax.trace(0.9), optax.stateless(scale), optax.scale(-0.5))


def of_layer_one(update) -> jax.Array:
    return sum(jnp.abs(leaf[1]).sum() for leaf in jax.tree.leaves(update.gradients["blocks"]))


def trained(mesh: dict[str, int], optimizer: optax.GradientTransformation) -> dict[str, list[float]]:
    model = {"preset": "llama-tiny", "layers": LAYERS, "vocab_size": VOCAB}
    run = make_run(run_values("x", model=model, mesh=mesh, train={"batch_size": 16, "micro_batch_size": 8}))
    engine = JaxEngine(run, run.model.spec, optimizer=optimizer, metrics={"one": of_layer_one})
    steps = [engine.train_step(batch(step)) for step in range(4)]
    return {name: [float(step[name]) for step in steps] for name in ("loss", "one")}


def main() -> None:
    found = {name: trained(mesh, halved_by_layer()) for name, mesh in MESHES.items()}
    print(json.dumps(found | {"alike": trained({"data": 8}, optax.chain(optax.trace(0.9), optax.scale(-0.5)))}))


@pytest.fixture(scope="module")
def measured():
    return measured_on_eight_devices(__file__)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in MESHES if name != "data 8"])
def test_layers_are_in_order(measured, name):
    for what, tolerance in (("loss", 1e-5), ("one", 1e-4)):
        assert measured[name][what] == pytest.approx(measured["data 8"][what], rel=tolerance)
    assert abs(measured["alike"]["loss"][-1] / measured["data 8"]["loss"][-1] - 1) > 1e-4  # its rates do matter


if __name__ == "__main__":
    sys.exit(main())
