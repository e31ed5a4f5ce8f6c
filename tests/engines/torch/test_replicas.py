"""Processes that each hold the whole model in bfloat16: what one process computes, and one copy of it on disk."""

import hashlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

import numpy as np
import torch
import torch.distributed as dist
from families import theirs
from processes import run_processes
from torch.distributed.fsdp import FSDPModule
from torch_jobs import FAMILIES, Layout, batch, make_engine, make_run, parameters, rows_of, whole

STEPS, LAYERS = 5, 2
FACTS = [("llama", "bfloat16"), ("llama", "float32"), ("gpt2", "bfloat16")]
"""Families, the second of which has one table for its embeddings and its head, and what they are computed in."""
SAVED = {"data": {"data": 2}, "fsdp": {"fsdp": 2}, "tensor": {"tensor": 2}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, _ in FACTS:
        kind, keys = FAMILIES[family]
        theirs(kind, **keys).save_pretrained(folder / family)
    return folder


@pytest.fixture
def checkpoint(checkpoints):
    return str(checkpoints / "llama")


def engine_of(checkpoint: str, mesh: dict[str, int], accumulate: int = 1, dtype: str = "bfloat16"):
    return make_engine(make_run(checkpoint, Layout(mesh, accumulate), train={"compute_dtype": dtype}))


def digest(tensors: dict[str, torch.Tensor] | dict[str, np.ndarray]) -> str:
    """Of the numbers of tensors, to the bit."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(np.ascontiguousarray(torch.as_tensor(tensors[name]).detach().float().numpy()).tobytes())
    return found.hexdigest()


def train(engine) -> dict[str, list]:
    """Losses, norms, and digests of each step: of the gradient that this process has by itself, and of what is stored
    and what is computed with after it; the sizes of what a step has all processes add up in place."""
    found: dict[str, list] = {"loss": [], "norm": [], "own": [], "stored": [], "used": [], "sent": []}
    optimizer, placed = engine._optimizer, engine._placed
    norm, all_reduce = optimizer.norm, dist.all_reduce

    def norm_of_all():
        grads = {name: p.grad for name, p in placed.parameters.items()}
        found["own"].append(digest(optimizer.gradients if placed.copies else grads))
        return norm()

    def counted(tensor, *arguments, **more):
        found["sent"][-1].append([tensor.numel(), str(tensor.dtype)])
        return all_reduce(tensor, *arguments, **more)

    optimizer.norm, dist.all_reduce = norm_of_all, counted
    try:
        for step in range(STEPS):
            found["sent"].append([])
            values = engine.train_step(rows_of(engine, batch(step)))
            found["loss"].append(float(values["loss"]))
            found["norm"].append(float(values["grad_norm"]))
            found["stored"].append(digest(parameters(engine)))
            found["used"].append(digest(dict(placed.module.named_parameters())))
    finally:
        dist.all_reduce = all_reduce
    return found


def facts_of(_group, checkpoints: str) -> dict:
    """What each of two processes finds out."""
    checkpoint = f"{checkpoints}/llama"
    replicas = engine_of(checkpoint, {"data": 2})
    modules = {
        axis: sum(isinstance(module, FSDPModule) for module in engine_of(checkpoint, mesh)._placed.module.modules())
        for axis, mesh in SAVED.items()
    }
    cases = {
        f"{family}, {dtype}, {accumulate}": train(engine_of(f"{checkpoints}/{family}", {"data": 2}, accumulate, dtype))
        for family, dtype in FACTS
        for accumulate in (1, 2)
    }
    return {"rows": replicas.rows.tolist(), "modules": modules, **cases}


@pytest.fixture(scope="module")
def facts(checkpoints):
    return run_processes(facts_of, arguments=(str(checkpoints),), engine="torch")


@pytest.mark.parametrize(("family", "dtype"), FACTS)
def test_two_replicas_have_the_numbers_of_one_process_to_the_bit(facts, checkpoints, family, dtype):
    """That one has the rows of each as a micro-batch, so that it adds up the same two gradients."""
    engine = engine_of(str(checkpoints / family), {}, 2, dtype)
    model = engine._placed.module.model
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == ("lm_head.weight" not in engine._placed.parameters) == (family == "gpt2")
    alone = train(engine)
    for one in facts:
        found = one[f"{family}, {dtype}, 1"]
        assert len(one["rows"]) == 4  # of 8: it is another computation
        assert len(set(alone["loss"])) == len(set(alone["stored"])) == STEPS
        assert all(a != b for a, b in zip(found["own"], alone["own"], strict=True))
        for key in ("loss", "norm", "stored", "used"):
            assert found[key] == alone[key], key


@pytest.mark.parametrize(("family", "dtype"), FACTS)
def test_micro_batches_of_replicas_have_the_losses_of_one_process(facts, checkpoints, family, dtype):
    alone = train(engine_of(str(checkpoints / family), {}, 4, dtype))
    for one in facts:
        found = one[f"{family}, {dtype}, 2"]
        np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5)
        np.testing.assert_allclose(found["norm"], alone["norm"], rtol=1e-5)
        assert found["own"] != alone["own"]


@pytest.mark.parametrize(("family", "dtype"), FACTS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_stay_equal_to_the_bit(facts, family, dtype, accumulate):
    first, second = (one[f"{family}, {dtype}, {accumulate}"] for one in facts)
    for key in ("loss", "norm", "stored", "used"):
        assert first[key] == second[key], key
    assert all(a != b for a, b in zip(first["own"], second["own"], strict=True))  # each has gradients of its own rows
    assert first["used"] == first["stored"] if dtype == "float32" else first["used"] != first["stored"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_a_batch_are_sent_once_as_one_tensor_in_float32(facts, checkpoint, dtype):
    engine = engine_of(checkpoint, {}, dtype=dtype)
    copies = engine._placed.copies
    size = copies.flat.size if copies else engine.trained_parameters
    assert (copies is None) == (dtype == "float32")
    for one in facts:
        for accumulate in (1, 2):
            assert one[f"llama, {dtype}, {accumulate}"]["sent"] == [[[size, "torch.float32"]]] * STEPS


def test_only_what_is_shared_out_is_in_the_hands_of_fsdp(facts):
    for one in facts:
        assert one["modules"] == {"data": 0, "fsdp": LAYERS + 1, "tensor": LAYERS + 1}


def state_of(engine) -> dict[str, str]:
    """Digests of the whole model and of each moment, and the count of updates; called by all processes."""
    moments = {
        moment: digest({name: whole(engine, name, part) for name, part in parts.items()})
        for moment, parts in engine._optimizer.state.items()
    }
    return {"model": digest(parameters(engine)), **moments, "count": str(engine._optimizer.count)}


def save_and_restore(_group, checkpoint: str, folder: str) -> dict:
    """Save on each mesh, and take up on each what was saved on each other one, and what one process saved."""
    saved, restored = {}, {}
    for name, mesh in SAVED.items():
        engine = engine_of(checkpoint, mesh)
        engine.train_step(rows_of(engine, batch(0)))
        saved[name] = state_of(engine)
        written = engine.save(Path(folder, name))
        losses = [float(engine.train_step(rows_of(engine, batch(1 + n)))["loss"]) for n in range(2)]  # it may go on
        written()
        saved[f"{name} goes on"] = losses
    for name, mesh in SAVED.items():
        for other in ("one", *SAVED):
            engine = engine_of(checkpoint, mesh)
            engine.restore(Path(folder, other))
            restored[f"{name} from {other}"] = state_of(engine)
            if name == other:
                losses = [float(engine.train_step(rows_of(engine, batch(1 + n)))["loss"]) for n in range(2)]
                restored[f"{name} goes on"] = losses
    return {"saved": saved, "restored": restored}


def test_one_copy_is_saved_and_restores_onto_every_mesh(checkpoint, tmp_path):
    for name in ("one", *SAVED):
        (tmp_path / name).mkdir()
    alone = engine_of(checkpoint, {})
    alone.train_step(batch(0))
    alone.save(tmp_path / "one")()
    found = run_processes(save_and_restore, arguments=(checkpoint, str(tmp_path)), engine="torch")
    saved = {"one": state_of(alone), **found[0]["saved"]}
    assert len({saved[name]["model"] for name in ("one", *SAVED)}) > 1  # bfloat16 rounds otherwise on other meshes
    fresh = engine_of(checkpoint, {})
    assert state_of(fresh)["model"] not in {saved[name]["model"] for name in ("one", *SAVED)}
    for other in ("one", *SAVED):
        again = engine_of(checkpoint, {})
        again.restore(tmp_path / other)
        assert state_of(again) == saved[other]
        for one in found:
            assert all(one["restored"][f"{name} from {other}"] == saved[other] for name in SAVED), other
    for one in found:
        assert one["restored"]["data goes on"] == one["saved"]["data goes on"] == found[0]["saved"]["data goes on"]
    sizes = {
        name: [path.stat().st_size for path in sorted((tmp_path / name).rglob("*.distcp"))] for name in ("one", *SAVED)
    }
    assert len(sizes["data"]) == 2 and abs(sum(sizes["data"]) / sum(sizes["one"]) - 1) < 0.01
    assert max(sizes["data"]) < 0.6 * sum(sizes["one"])  # each wrote a part
