"""The PyTorch engine on meshes of processes: the same losses, gradients and parameters as one process has."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch_jobs
from torch_jobs import FAMILIES, LAYOUTS, MORE, RESTORED, Layout, layout_of, make_run, result, train

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(1100)  # all cases run before the first test, up to eight processes side by side

CASES = [f"{family}/{layout}" for family in FAMILIES for layout in LAYOUTS]
CASES += ["qwen3/tensor 2", "gemma3/tensor 2", "mixtral/fsdp 2, accumulation 2"]
CASES += ["qwen2 tied/ddp 2 x fsdp 2 x tensor 2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random checkpoints, and what all cases gave, started together since starting takes the time."""
    from families import theirs

    place = tmp_path_factory.mktemp("torch")
    for name, (kind, keys) in {**FAMILIES, **MORE}.items():
        theirs(kind, **keys).save_pretrained(place / name)
    for workers in (8, 4, 2):
        names = [case for case in CASES if layout_of(case).workers == workers]
        names += ["/".join(case) for case in RESTORED if workers == 2]
        torch_jobs.start(place, workers, names)
    return place


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gives, with the engine."""
    return {family: train(make_run(folder / family, Layout({}))) for family in {**FAMILIES, **MORE}}


def apart(one, many):
    """Norm of the difference over norm."""
    return np.linalg.norm(one - many) / np.linalg.norm(one)


def without_key_bias(name, value):
    """A bias of the keys adds the same to all scores of a query, where positions are learned: rounding is all of its
    gradient, of which Adam makes full steps."""
    if not name.endswith("c_attn.bias"):
        return value
    query, _, value = np.split(value, 3)
    return np.concatenate([query, value])


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(folder, alone, case):
    one, many = alone[case.split("/")[0]][1], result(folder, case)
    assert len(many["rows"]) < len(one["rows"]) or "tensor" in case  # it is another computation
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(many["norm"], one["norm"], rtol=1e-5)
    np.testing.assert_allclose(many["eval"], one["eval"], rtol=1e-5)
    compared = 0
    for key, value in one.items():
        kind, _, name = key.partition("/")
        if kind == "initial":
            np.testing.assert_array_equal(many[key], value)
        elif kind in ("gradient", "final"):
            here, there = without_key_bias(name, value), without_key_bias(name, many[key])
            assert apart(here, there) < 1e-4, key
            compared += 1
    assert compared > 5 * 20


@pytest.mark.parametrize("case", CASES)
def test_all_processes_agree_and_a_tensor_group_reads_the_same_rows(folder, case):
    layout = layout_of(case)
    found = [result(folder, case, rank) for rank in range(layout.workers)]
    for other in found[1:]:
        np.testing.assert_array_equal(other["loss"], found[0]["loss"])
        np.testing.assert_array_equal(other["text"], found[0]["text"])
    tensor = layout.mesh.get("tensor", 1)
    for rank, one in enumerate(found):
        np.testing.assert_array_equal(one["rows"], found[rank - rank % tensor]["rows"])
    read = np.concatenate([one["rows"] for one in found[::tensor]])
    assert sorted(read) == list(range(torch_jobs.BATCH))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_writes_the_same_text(folder, alone, family):
    from meshwright.engines.base import Sampling

    texts = list(alone[family][0].generate([[1, 2, 3], [4]], 6, torch_jobs.VOCAB, Sampling(seed=1)))
    assert len(texts) == 6
    for layout in LAYOUTS:
        assert result(folder, f"{family}/{layout}")["text"].tolist() == texts, layout


@pytest.mark.parametrize(("family", "layout", "other"), RESTORED)
def test_a_state_is_gone_on_from_on_another_mesh(folder, alone, family, layout, other):
    engine, _ = alone[family]
    found, saved = result(folder, f"{family}/{layout}/{other}"), result(folder, f"{family}/{other[5:]}")
    for key, value in saved.items():
        if key.startswith("final/"):
            np.testing.assert_array_equal(found[key.replace("final", "initial")], value)
    went_on = make_run(folder / family, Layout({}))
    engine = torch_jobs.make_engine(went_on)
    engine.restore(folder / f"state of {family} on {other[5:]}")
    losses = [float(engine.train_step(torch_jobs.batch(torch_jobs.STEPS + n))["loss"]) for n in range(2)]
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)


@pytest.mark.parametrize(("layout", "share"), [("fsdp 4", 4), ("fsdp 2 x tensor 2", 4), ("tensor 2", 2), ("ddp 2", 1)])
def test_a_process_reads_its_share_of_a_checkpoint_alone(folder, layout, share):
    for rank in range(LAYOUTS[layout].workers):
        read, largest, parameters = result(folder, f"llama/{layout}", rank)["read"]
        assert read < 1.25 * parameters / share, rank  # norms are whole where just tensors are cut; 97 is uneven
        assert largest <= 1.05 * 97 * 32 / share


def test_tied_and_untied_are_different_models(alone):
    tied, untied = alone["qwen2 tied"][1], alone["qwen2"][1]
    assert "initial/lm_head.weight" in untied and "initial/lm_head.weight" not in tied
    assert abs(tied["norm"][0] / untied["norm"][0] - 1) > 1e-3
