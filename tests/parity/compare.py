"""What differs between a run on one device and the same run on a mesh."""

from typing import Any

import numpy as np

EXEMPT = "attention.key.bias"
"""Without rotary positions, a bias of the keys adds the same to all scores of a query: its gradient is zero but for
rounding, of which Adam makes full steps. Its gradient is compared against that of the queries' bias."""


def compare(one: dict[str, np.ndarray], many: dict[str, np.ndarray]) -> dict[str, Any]:
    """The largest differences over all steps and tensors.

    Arguments:
        one, many: what `jobs.train` returned.

    Returns:
        `loss` and `eval`: relative; `initial`, `gradient` and `param`: norm of the difference over norm, of the worst
        tensor; the same with `_cosine`, the smallest; `worst`: the tensor with the worst gradient, and `ratio`: of its
        norms.
    """
    assert one.keys() == many.keys() | {"eval"}
    row: dict[str, Any] = {"loss": 0.0, "initial": 0.0, "gradient": 0.0, "param": 0.0, "worst": "", "ratio": 1.0}
    row |= {"gradient_cosine": 1.0, "param_cosine": 1.0}
    row["eval"] = abs(float(many["eval"]) / float(one["eval"]) - 1) if "eval" in many else 0.0
    for name in one.keys() - {"eval", "layout"}:
        step, kind, *rest = name.split("/")
        if (step, kind) == ("0", "gradient"):  # there was none yet
            continue
        if kind == "loss":
            row["loss"] = max(row["loss"], abs(float(many[name]) / float(one[name]) - 1))
        elif rest[0].endswith(EXEMPT) and kind == "gradient":
            scale = np.linalg.norm(one[name.replace("key.bias", "query.bias")])
            difference = float(np.linalg.norm(many[name] - one[name]) / scale)
            if difference > row["gradient"]:
                row |= {"gradient": difference, "worst": rest[0], "ratio": 1.0}
        elif not rest[0].endswith(EXEMPT):
            _add(row, "initial" if step == "0" else kind, rest[0], one[name], many[name])
    return row


def _add(row: dict[str, Any], kind: str, name: str, one: np.ndarray, many: np.ndarray) -> None:
    a, b = one.astype(np.float64).ravel(), many.astype(np.float64).ravel()
    size = np.linalg.norm(a)
    if size == 0.0:  # a bias that starts at zero
        assert not b.any(), name
        return
    difference = float(np.linalg.norm(a - b) / size)
    if kind == "gradient" and difference > row["gradient"]:
        row["worst"] = name
        row["ratio"] = float(np.linalg.norm(b) / size)
    row[kind] = max(row[kind], difference)
    if kind != "initial":
        cosine = float(a @ b / (size * np.linalg.norm(b)))
        row[f"{kind}_cosine"] = min(row[f"{kind}_cosine"], cosine)
