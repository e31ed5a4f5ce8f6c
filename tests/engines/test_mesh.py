"""The sizes of a mesh: what fits, what is refused and with which arithmetic, and which rows lie where."""

import pytest
from helpers import run_values
from processes import run_processes

import meshwright as mw
from meshwright.engines.jax.mesh import check_mesh, make_run_mesh, mesh_sizes
from meshwright.errors import UserError


def make(mesh: dict | None = None, model: dict | None = None, **sections: dict) -> mw.Run:
    sizes = {"layers": 4, "width": 32, "heads": 4, "ffn_width": 64, **(model or {})}
    return mw.make_run(run_values("texts", mesh={"data": 1, **(mesh or {})}, model=sizes, **sections))


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({"fsdp": 2, "tensor": 2}, 8, "mesh: fsdp 2 x tensor 2 = 4 devices, but there are 8; change a size, or set"),
        ({}, 4, "mesh: 1 = 1 devices, but there are 4; change a size"),
        ({"data": 4, "pipeline": 2}, 4, "mesh: pipeline 2 x data 4 = 8 devices, but there are 4;"),
        ({"data": -1, "fsdp": 3}, 8, "mesh.data = -1: what is left of 8 devices after fsdp 3 = 3 isn't whole; choose"),
        ({"tensor": -1, "context": 8}, 4, "mesh.tensor = -1: what is left of 4 devices after context 8 = 8 isn't"),
    ],
)
def test_sizes_that_do_not_make_up_the_devices(mesh, devices, expected):
    with pytest.raises(UserError) as caught:
        mesh_sizes(make(mesh), devices)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


EXPERTS = {"preset": "moe-tiny", "kv_heads": 4, "experts": 4}
LATENT = {"preset": "deepseek-tiny", "kv_latent": 6, "query_latent": 8, "head_width": 8, "rotary_width": 4}


@pytest.mark.parametrize(
    ("mesh", "sections", "expected"),
    [
        (
            {"data": 2, "fsdp": 4},
            {},
            "train.micro_batch_size = 4: must be a multiple of mesh data 2 x fsdp 4 x expert 1 = 8, which share",
        ),
        (
            {"data": 4},
            {"train": {"batch_size": 8, "micro_batch_size": 2}},
            "train.micro_batch_size = 2: must be a multiple of mesh data 4 x fsdp 1 x expert 1 = 4, which share",
        ),
        ({"expert": 2}, {}, "mesh.expert = 2: the model has no experts; use data or fsdp in its place"),
        (
            {"expert": 3},
            {"model": EXPERTS, "train": {"batch_size": 3}},
            "mesh.expert = 3: must divide model.experts = 4 (it leaves 1); change one of them",
        ),
        (
            {"context": 3},
            {},
            "train.sequence_length = 32: must be a multiple of 2 x mesh.context = 6; change one of them",
        ),
        ({"tensor": 3}, {}, "mesh.tensor = 3: must divide model.heads = 4 (it leaves 1); change one of them"),
        (
            {"tensor": 4},
            {"model": {"ffn_width": 66}},
            "mesh.tensor = 4: must divide model.ffn_width = 66 (it leaves 2); change one of them",
        ),
        (
            {"fsdp": 3},
            {"train": {"batch_size": 3}},
            "mesh.fsdp = 3: must divide model.width = 32 (it leaves 2); change one of them",
        ),
        (
            {"fsdp": 4},
            {"model": LATENT},
            "mesh.fsdp = 4: must divide model.kv_latent = 6 (it leaves 2); change one of them",
        ),
        ({"pipeline": 3}, {}, "mesh.pipeline = 3: must divide model.layers = 4 (it leaves 1); change one of them"),
        (
            {"pipeline": 2, "pipeline_rounds": 3},
            {},
            "mesh.pipeline_rounds = 3: 2 stages x 3 rounds = 6 must divide model.layers = 4; change one of them",
        ),
        (
            {"pipeline": 2, "pipeline_rounds": 2},
            {},
            "mesh.pipeline_rounds = 2: needs at least as many micro-batches as stages; there are 1 (train.batch_size 4 "
            "/ micro_batch_size 4) for 2 stages; make micro_batch_size smaller",
        ),
    ],
)
def test_a_mesh_that_the_run_cannot_be_cut_along(mesh, sections, expected):
    run = make(mesh, **sections)
    devices = 1
    for axis, size in mesh.items():
        devices *= 1 if axis == "pipeline_rounds" else size
    sizes = mesh_sizes(run, devices)
    with pytest.raises(UserError) as caught:
        check_mesh(run, run.model.spec, sizes)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
    whole = make(**sections)
    check_mesh(whole, whole.model.spec, mesh_sizes(whole, 1))


@pytest.mark.parametrize(
    ("mesh", "devices", "axis", "expected"),
    [
        ({"data": -1}, 1, "data", 1),
        ({"data": -1}, 6, "data", 6),
        ({"data": -1, "fsdp": 2, "tensor": 2}, 16, "data", 4),
        ({"fsdp": -1, "pipeline": 2}, 8, "fsdp", 4),
        ({"context": -1, "data": 2}, 2, "context", 1),
    ],
)
def test_minus_one_is_what_is_left(mesh, devices, axis, expected):
    sizes = mesh_sizes(make(mesh), devices)
    assert sizes == {**dict.fromkeys(sizes, 1), **mesh, axis: expected}


def rows_of_a_worker(group, meshes: list[dict]) -> list[dict]:
    """For each mesh its sizes, the rows that this process reads, and those that come to lie on its devices."""
    import numpy as np

    from meshwright.data.examples import Batch

    found = []
    for mesh in meshes:
        run = make(mesh, train={"batch_size": 8, "micro_batch_size": 4})
        on = make_run_mesh(run, run.model.spec)
        numbers = np.broadcast_to(on.rows(8)[:, None], (len(on.rows(8)), 32)).astype(np.int32)
        placed = on.place(Batch(numbers, numbers, numbers.astype(np.float32))).inputs_BT
        here = [shard.data[..., 0].tolist() for shard in placed.addressable_shards]
        found.append({"sizes": on.sizes, "rows": on.rows(8).tolist(), "shape": placed.shape, "here": here})
    return found


def test_each_process_reads_the_rows_that_its_devices_need():
    meshes = [{"data": -1}, {"data": 1, "pipeline": 2}, {"data": 1, "tensor": -1}]
    first, second = run_processes(rows_of_a_worker, workers=2, arguments=(meshes,))
    for data, pipeline, tensor in (first, second):
        assert (data["sizes"]["data"], pipeline["sizes"]["pipeline"], tensor["sizes"]["tensor"]) == (2, 2, 2)
    assert (first[0]["rows"], second[0]["rows"]) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert (first[0]["here"], second[0]["here"]) == ([[[0, 1], [4, 5]]], [[[2, 3], [6, 7]]])
    for of_a_mesh in (first[1], second[1], first[2], second[2]):
        assert of_a_mesh["rows"] == list(range(8))
        assert of_a_mesh["here"] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert all(of_a_mesh["shape"] == [2, 4, 32] for of_a_mesh in first + second)
