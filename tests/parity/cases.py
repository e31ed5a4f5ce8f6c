"""The models, meshes and accumulations of the parity matrix."""

from typing import NamedTuple

STEPS = 5
BATCH, TIME, VOCAB = 32, 16, 61  # 61 is divided by no mesh, so that the vocabulary is padded on each with a tensor axis

_SMALL = {"layers": 8, "width": 32, "heads": 8, "ffn_width": 64, "context_length": 32, "vocab_size": VOCAB}

FAMILIES = {
    "gpt2": {**_SMALL, "preset": "gpt2-tiny", "dropout": 0.1},
    "llama": {**_SMALL, "preset": "llama-tiny", "kv_heads": 2, "head_width": 4},
    "moe": {**_SMALL, "preset": "moe-tiny", "kv_heads": 2, "head_width": 4, "ffn_width": 32},
    "mla-moe": {
        **_SMALL,
        "preset": "deepseek-tiny",
        "head_width": 4,
        "rotary_width": 4,
        "kv_latent": 16,
        "query_latent": 24,
        "ffn_width": 32,
    },
}
FAMILIES["moe-capacity"] = {**FAMILIES["moe"], "capacity_factor": 1.0}


class Layout(NamedTuple):
    """A mesh, and how many processes share its devices."""

    name: str
    mesh: dict[str, int]
    processes: int = 1

    @property
    def devices(self) -> int:
        product = 1
        for axis, size in self.mesh.items():
            product *= 1 if axis == "pipeline_rounds" else size
        return product


LAYOUTS = [
    Layout("data 8", {"data": 8}),
    Layout("fsdp 8", {"fsdp": 8}),
    Layout("data 2 x fsdp 4", {"data": 2, "fsdp": 4}),
    Layout("tensor 2", {"tensor": 2}),
    Layout("tensor 4", {"tensor": 4}),
    Layout("tensor 8", {"tensor": 8}),
    Layout("data 2 x tensor 4", {"data": 2, "tensor": 4}),
    Layout("pipeline 2", {"pipeline": 2}),
    Layout("pipeline 4", {"pipeline": 4}),
    Layout("pipeline 2, circular", {"pipeline": 2, "pipeline_rounds": 2}),
    Layout("pipeline 4, circular", {"pipeline": 4, "pipeline_rounds": 2}),
    Layout("data 2 x pipeline 2 x tensor 2", {"data": 2, "pipeline": 2, "tensor": 2}),
    Layout("context 2", {"context": 2}),
    Layout("context 4", {"context": 4}),
    Layout("context 2 x tensor 2", {"context": 2, "tensor": 2}),
    Layout("expert 4", {"expert": 4}),
    Layout("data 2 x expert 4", {"data": 2, "expert": 4}),
    Layout("fsdp 2 x expert 2 x tensor 2", {"fsdp": 2, "expert": 2, "tensor": 2}),
    Layout("pipeline 2 x context 2 x expert 2", {"pipeline": 2, "context": 2, "expert": 2}),
    Layout("2 processes: data 2 x fsdp 4", {"data": 2, "fsdp": 4}, 2),
    Layout("2 processes: data 2 x pipeline 2 x tensor 2", {"data": 2, "pipeline": 2, "tensor": 2}, 2),
    Layout("2 processes: context 2 x tensor 4", {"context": 2, "tensor": 4}, 2),
]
ACCUMULATIONS = (1, 2, 4)
ONE = Layout("one device", {})
BY_NAME = {layout.name: layout for layout in [ONE, *LAYOUTS]}


def cases(family: str) -> list[tuple[Layout, int]]:
    """Every layout that a family can have, with every accumulation that the layout can have."""
    return [
        (layout, accumulate)
        for layout in LAYOUTS
        for accumulate in ACCUMULATIONS
        if ("expert" not in layout.mesh or "moe" in family)
        and (family != "moe-capacity" or (accumulate == 2 and {"expert", "context", "pipeline"} & layout.mesh.keys()))
        and ("pipeline_rounds" not in layout.mesh or accumulate >= layout.mesh["pipeline"])
    ]


def covering() -> list[tuple[str, Layout, int]]:
    """Every layout with three families, in turns at its accumulations.

    They are both dense ones and one of the two with experts; where the experts are cut, all three that have some.
    """
    found = []
    for number, layout in enumerate(LAYOUTS):
        with_experts = ["moe", "mla-moe"]
        families = (
            [*with_experts, "moe-capacity"] if "expert" in layout.mesh else ["gpt2", "llama", with_experts[number % 2]]
        )
        for turn, family in enumerate(families):
            counts = [accumulate for one, accumulate in cases(family) if one == layout]
            found.append((family, layout, counts[(number + turn) % len(counts)]))
    return found


def always() -> list[tuple[str, Layout, int]]:
    """The part that `make test` runs: of `covering`, every layout with one family, in turns."""
    return [covering()[3 * number + number % 3] for number in range(len(LAYOUTS))]
