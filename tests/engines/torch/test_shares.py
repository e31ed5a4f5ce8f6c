"""What one of several processes holds of a model, and how often it sends gradients."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))

from processes import run_processes
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_jobs import Layout, batch, make_engine, make_run, rows_of

from meshwright.engines.torch.mesh import make_torch_mesh
from meshwright.engines.torch.plan import Placed
from meshwright.engines.torch.start import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

LLAMA = {"preset": "llama-tiny", "init": "random", "vocab_size": 97}
LARGE = {"layers": 12, "width": 384, "heads": 4, "kv_heads": 4, "ffn_width": 1536}
LAYERS, MICRO_BATCHES = 3, (1, 2, 4)


def held(mesh: dict[str, int]) -> list[float]:
    """MiB of a model's parameters, and by how much the most memory that this process ever had rose to make it."""

    def make(**keys: int) -> Placed:
        run = make_run("", Layout(mesh), model={**LLAMA, **keys})
        placed = Placed(run, run.model.spec, make_torch_mesh(run, run.model.spec))
        start(placed, run, run.model.spec)
        return placed

    make()  # what is loaded on first use
    before = peak()
    placed = make(**LARGE)
    return [sum(t.numel() for t in placed.tensors.values()) * 4 / 2**20, peak() - before]


def peak() -> float:
    """MiB; `ru_maxrss` would be that of the process that started this one, too."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10


class Sent(TorchDispatchMode):
    """Counts what is sent, by how."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.calls[str(function).removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


def update(mesh: dict[str, int], micro_batches: int) -> tuple[dict[str, int], list[int]]:
    """What an update sends; and after each pass through a block, forward and backward, how many blocks are whole."""
    engine = make_engine(make_run("", Layout(mesh, micro_batches), model={**LLAMA, "layers": LAYERS}))
    blocks, whole = engine._placed.module.model.model.layers, []

    def count(*_):
        whole.append(sum(any(not isinstance(p, DTensor) for p in block.parameters()) for block in blocks))

    engine.train_step(rows_of(engine, batch(0)))
    for block in blocks:
        block.register_forward_pre_hook(count)
        block.register_full_backward_hook(count)
    with Sent() as sent:
        engine.train_step(rows_of(engine, batch(1)))
    return dict(sent.calls), whole


def facts_of(_group, mesh: dict[str, int]) -> dict[str, list]:
    return {"held": held(mesh), "updates": [update(mesh, number) for number in MICRO_BATCHES]}


@pytest.fixture(scope="module")
def facts():
    """By axis, of each of two processes."""
    return {
        axis: run_processes(facts_of, arguments=({axis: 2},), engine="torch") for axis in ("data", "fsdp", "tensor")
    }


@pytest.mark.parametrize(("axis", "share"), [("fsdp", 2), ("tensor", 2), ("data", 1)])
def test_to_make_a_model_takes_no_more_memory_than_the_share(facts, axis, share):
    for whole, rose in (one["held"] for one in facts[axis]):
        assert whole > 100
        assert 0.9 * whole / share < rose < 1.3 * whole / share


def test_one_block_at_a_time_is_whole_where_they_are_shared_out(facts):
    for number, micro_batches in enumerate(MICRO_BATCHES):
        for axis, most in (("fsdp", 1), ("data", LAYERS)):
            for one in facts[axis]:
                _, whole = one["updates"][number]
                assert len(whole) == 2 * LAYERS * micro_batches
                assert max(whole) == most


@pytest.mark.parametrize(
    ("axis", "how", "many"),
    [
        ("fsdp", "c10d._reduce_scatter_base_", LAYERS + 1),  # each block, and what isn't in one
        ("data", "c10d.allreduce_", 1),  # of all parameters
    ],
)
def test_gradients_are_sent_once_an_update_however_many_micro_batches(facts, axis, how, many):
    for one in facts[axis]:
        sent = [calls for calls, _ in one["updates"]]
        assert [calls[how] for calls in sent] == [many] * len(MICRO_BATCHES)
        sums = [calls["_c10d_functional.all_reduce"] for calls in sent]
        assert sums == [sums[0]] * len(MICRO_BATCHES)
        gathers = [calls.get("c10d._allgather_base_", 0) for calls in sent]
        assert gathers == [gathers[0] * number for number in MICRO_BATCHES]
        # Shares of parameters are fetched for each pass, so that it is other work; replicas have nothing to fetch.
        assert (gathers[0] > 0) == (axis == "fsdp")
