"""Batches of whole documents side by side: the model sees each as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import QUICK, run_values
from processes import run_processes

from meshwright.config import Run, make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.step import make_loss
from meshwright.models.decoder import Decoder

VOCAB, ROWS, TIME = 61, 4, 32
# Targets of the documents of each row; what is left of a row is padding.
DOCUMENTS = [[32], [20, 12], [9, 8, 7, 3], []]


def make(preset: str = "llama-tiny", document_mask: bool = True, **sections) -> Run:
    """Rotary positions, or with `gpt2-tiny` learned ones."""
    model = {"preset": preset, "kv_heads": 2, "vocab_size": VOCAB, **sections.pop("model", {})}
    data = {"packing": "packed", "document_mask": document_mask}
    train = {"compute_dtype": "float32", **sections.pop("train", {})}
    return make_run({**run_values("x", model=model, data=data, train=train, **sections)})


def documents() -> list[list[np.ndarray]]:
    """The tokens of each document of each row, of which some don't count."""
    random = np.random.default_rng(0)
    return [[random.integers(0, VOCAB, size + 1, dtype=np.int32) for size in sizes] for sizes in DOCUMENTS]


def counts(document: np.ndarray) -> np.ndarray:
    """Whether each target of a document counts: not the first two, where it has more."""
    return (np.arange(len(document) - 1) >= min(2, len(document) - 2)).astype(np.float32)


def packed(document_mask: bool = True) -> Batch:
    """One row each."""
    inputs, targets, segments, positions = np.zeros((4, ROWS, TIME), np.int32)
    weights = np.zeros((ROWS, TIME), np.float32)
    for row, in_row in enumerate(documents()):
        begin = 0
        for number, document in enumerate(in_row, 1):
            here = slice(begin, begin := begin + len(document) - 1)
            inputs[row, here], targets[row, here] = document[:-1], document[1:]
            weights[row, here], segments[row, here] = counts(document), number
            positions[row, here] = np.arange(len(document) - 1)
    return Batch(inputs, targets, weights, *((segments, positions) if document_mask else ()))


def alone() -> Batch:
    """Each document in a row of its own, as the model is trained on documents that aren't packed."""
    each = [document for in_row in documents() for document in in_row]
    inputs, targets = np.zeros((2, 2 * ROWS, TIME), np.int32)
    weights = np.zeros((2 * ROWS, TIME), np.float32)
    for row, document in enumerate(each):
        size = len(document) - 1
        inputs[row, :size], targets[row, :size], weights[row, :size] = document[:-1], document[1:], counts(document)
    return Batch(inputs, targets, weights)


def loss_and_gradients(run: Run):
    """A function of a batch, to its loss (a token) and the gradients of that."""
    program = Program(run, run.model.spec, model=Decoder)
    loss_sum = make_loss(program.state.graph, run, run.model.spec, program.mesh, jnp.float32)
    params = program.make_state().params

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        whole = loss_sum(params, batch)
        return whole.total / whole.tokens

    return lambda batch: loss(params, program.mesh.place(batch))


def largest_difference(one: dict, other: dict) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-tiny"])
def test_a_packed_batch_has_the_loss_of_its_documents_one_by_one(preset):
    of = loss_and_gradients(make(preset))
    loss, gradients = of(packed())
    expected, by_document = of(alone())
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    assert largest_difference(gradients, by_document) < 1e-6
    unmasked = Batch._make(
        None if part is None else np.concatenate([part, part]) for part in packed(document_mask=False)
    )
    loss, gradients = of(unmasked)
    assert float(loss) != pytest.approx(float(expected), abs=1e-4)
    assert largest_difference(gradients, by_document) > 1e-4
    for part in ("segments_BT", "positions_BT"):  # each of the two matters by itself
        loss, _ = of(packed()._replace(**{part: np.ones((ROWS, TIME), np.int32)}))
        assert float(loss) != pytest.approx(float(expected), abs=5e-6), part


def test_rows_of_padding_alone_give_numbers():
    run = make()
    engine, empty = JaxEngine(run, run.model.spec), jax.tree.map(np.zeros_like, packed())
    values = engine.train_step(empty)
    assert float(values["loss"]) == float(values["tokens"]) == 0.0 and engine.is_finite()
    values = engine.train_step(empty._replace(weights_BT=np.ones((ROWS, TIME), np.float32)))
    assert 0 < float(values["loss"]) < 10 and float(values["grad_norm"]) > 0 and engine.is_finite()
    one, other = packed(), packed()
    for part in (other.inputs_BT, other.targets_BT):
        part[one.segments_BT == 0] = 7
    assert float(engine.eval_step(one)[0]) == float(engine.eval_step(other)[0])


MESHES = [
    {"data": 2, "context": 2},
    {"data": 1, "context": 2, "pipeline": 2},
]


def run_on(mesh: dict) -> Run:
    """With learned positions: at the start of training, the loss hardly depends on rotary ones."""
    return make("gpt2-tiny", mesh=mesh, train={"micro_batch_size": 2, "scan_layers": True})


def on_meshes(group) -> list[list[float]]:
    """The loss and the gradient norm on each mesh."""
    found = []
    for mesh in MESHES:
        run = run_on(mesh)
        engine = JaxEngine(run, run.model.spec)
        values = engine.train_step(Batch._make(part[engine.rows] for part in packed()))
        found.append([float(values["loss"]), float(values["grad_norm"])])
    return found


def test_a_mesh_sees_documents_as_one_device_does(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    (found,) = run_processes(on_meshes, workers=1, devices_per_worker=4, timeout=200)
    loss, gradients = loss_and_gradients(make("gpt2-tiny"))(packed())
    expected = [float(loss), float(optax.global_norm(gradients))]
    assert found == [pytest.approx(expected, rel=2e-5)] * len(MESHES)
