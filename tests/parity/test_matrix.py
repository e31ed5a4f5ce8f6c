"""The first promise: the mesh never changes the training. Every model on every layout, against one device."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import ACCUMULATIONS, BATCH, BY_NAME, FAMILIES, LAYOUTS, ONE, STEPS, TIME, Layout, always, cases, covering
from compare import EXEMPT, compare
from matrix import WAIT, Matrix


def _marks(case: tuple[str, Layout, int]) -> list[pytest.MarkDecorator]:
    if case in always():
        return []
    return [pytest.mark.slow if case in covering() else pytest.mark.matrix]


ALL = [
    pytest.param(*case, marks=_marks(case)) for family in FAMILIES for case in [(family, *one) for one in cases(family)]
]


@pytest.fixture(scope="module")
def matrix(request):
    wanted = {
        (item.callspec.params["family"], item.callspec.params["layout"].name, item.callspec.params["accumulate"])
        for item in request.session.items
        if item.name.startswith("test_same_training") and hasattr(item, "callspec")
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-parity-") as folder:
        matrix = Matrix(Path(folder), wanted)
        yield matrix
        matrix.close()


def _name(value: object) -> str:
    return value.name.replace(" ", "_") if isinstance(value, Layout) else str(value)


@pytest.mark.timeout(WAIT)
@pytest.mark.parametrize(("family", "layout", "accumulate"), ALL, ids=_name)
def test_same_training(matrix, family, layout, accumulate):
    one, many = matrix.result(family, ONE, 1), matrix.result(family, layout, accumulate)
    row = compare(one, many)
    assert row["loss"] < 1e-5, row
    assert row["eval"] < 1e-5, row
    assert row["initial"] < 1e-6, row
    assert row["gradient"] < 1e-4, row
    assert row["gradient_cosine"] > 0.99999, row
    assert row["param"] < 1e-4, row
    assert row["param_cosine"] > 0.99999, row
    facts = json.loads(str(many["layout"]))
    assert not facts["replicas differ"]
    assert_layouts_differ(layout, facts)
    assert facts["processes"] == layout.processes


def assert_layouts_differ(layout: Layout, facts: dict) -> None:
    """That the mesh cut what it is there to cut."""
    mesh, cut = layout.mesh, {}
    for name, shape in facts["shapes"].items():
        cut[name] = [whole // part for whole, part in zip(shape, facts["shards"][name], strict=True)]
    shares = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    assert facts["batch"] == [1, BATCH // shares, TIME // mesh.get("context", 1)]
    out = next(name for name in cut if name.startswith("blocks.attention.out.kernel"))
    assert cut[out] == [mesh.get("pipeline", 1), mesh.get("tensor", 1), mesh.get("fsdp", 1)]
    if "expert" in mesh:
        assert cut["blocks.mlp.up"][1] == mesh["expert"]
    if "tensor" in mesh:
        assert cut["embedding"][0] == mesh["tensor"]
        assert facts["shapes"]["embedding"][0] > 61  # padded, and never seen outside


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(WAIT)
def test_every_parameter_has_a_gradient(matrix, family):
    one = matrix.result(family, ONE, 1)
    norms = {name: np.linalg.norm(value) for name, value in one.items() if name.startswith("1/gradient")}
    assert len(norms) > 10
    for name, norm in norms.items():
        # What a router's bias changes is the choice alone, which has no gradient.
        assert norm > 0 or name.endswith((EXEMPT, "mlp.router_bias")), name


def test_a_difference_is_seen(matrix):
    """The comparison itself: another seed of the data, a factor of two, a swapped tensor."""
    one = matrix.result("llama", ONE, 1)
    scaled = {name: value * 1.001 if "/gradient/" in name else value for name, value in one.items()}
    assert compare(one, scaled)["gradient"] > 1e-4
    swapped = {**one, "3/gradient/blocks.mlp.up.kernel": one["3/gradient/blocks.mlp.gate.kernel"]}
    assert compare(one, swapped)["gradient_cosine"] < 0.99
    assert BY_NAME["data 8"].devices == 8
    assert STEPS == 5


def test_what_is_run_covers_the_matrix():
    """By `make test` every family, and every layout; with `make test-slow` every family with each of its accumulations,
    and every layout with three families and all accumulations or, where few families or accumulations have it, two."""
    everything = {(family, layout.name, accumulate) for family in FAMILIES for layout, accumulate in cases(family)}
    first, some = ({(case[0], case[1].name, case[2]) for case in part()} for part in (always, covering))
    assert first < some < everything
    assert [case[1] for case in always()] == LAYOUTS
    assert {case[0] for case in first} == set(FAMILIES)
    assert {case[2] for case in first} == set(ACCUMULATIONS)
    assert {case[::2] for case in some} == {case[::2] for case in everything}
    for layout in LAYOUTS:
        mine, there = ([case for case in part if case[1] == layout.name] for part in (some, everything))
        assert len(mine) == len({case[0] for case in mine}) == 3, layout
        found, all_there = ({case[2] for case in part} for part in (mine, there))
        few = {"expert", "pipeline_rounds"} & layout.mesh.keys()
        assert len(found) >= min(2, len(all_there)) if few else found == set(ACCUMULATIONS), layout
