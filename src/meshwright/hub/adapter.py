"""LoRA adapters in the form of the library `peft`: written, read again, and compared.

Shapes: I and O widths of input and output, R rank.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.config_train import LoraSection
from meshwright.errors import UserError
from meshwright.hub.export import Parameters
from meshwright.hub.proof import Logits, Proof, difference, tolerance_of
from meshwright.hub.reference import peft_logits, peft_version
from meshwright.hub.tensor_file import read_header, read_tensor, write_file
from meshwright.models.spec import ModelSpec
from meshwright.models.targets import Adapter, a_of, adapters_of, target_names
from meshwright.models.weights import write

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_MISSING = (
    "not compared with peft, which isn't installed with transformers (pip install peft 'meshwright[torch]'): that "
    "names are as it has them rests on Meshwright's own tests"
)


class _Place(NamedTuple):
    """An adapter of one layer."""

    module: str
    adapter: Adapter
    layer: tuple[int, ...]


def write_adapter(folder: Path, spec: ModelSpec, lora: LoraSection, parameters: Parameters, base: str) -> None:
    """Write `adapter_config.json` and the tensors, float32.

    Arguments:
        folder: an empty one.
        spec: the architecture.
        lora: rank, scale and targets.
        parameters: with the adapters as parameters of their own.
        base: name or folder of the checkpoint that they belong to.
    """
    adapters = adapters_of(spec, lora.targets)
    alpha: float = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "target_modules": target_names(spec, adapters),
        "fan_in_fan_out": adapters[0].is_turned,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    places, shapes = list(_places(adapters, parameters)), {}
    for place in places:
        for name, tensor in _tensors(place, parameters):
            shapes[name] = tensor.shape
    values = (pair for place in places for pair in _tensors(place, parameters))
    write_file(folder / TENSORS, shapes, "F32", values)


class Base:
    """Parameters without the adapters that are some of them; see `meshwright.hub.export.Parameters`.

    Arguments:
        parameters: as in `write_adapter`.
    """

    def __init__(self, parameters: Parameters):
        self.shapes = {path: shape for path, shape in parameters.shapes.items() if ".lora." not in path}
        self.read = parameters.read


def prove_adapter(
    folder: Path,
    spec: ModelSpec,
    lora: LoraSection,
    parameters: Parameters,
    *,
    base: Path,
    tokens_BT: np.ndarray,
    run_logits: Logits,
) -> Proof:
    """Read the tensors again from disk, and compare what they do with the run's model.

    Arguments:
        folder: that they were written to.
        spec, lora, parameters: as in `write_adapter`.
        base: folder of the checkpoint that they belong to.
        tokens_BT: real token ids.
        run_logits: of the run's model, `[B, T, V]` float32.

    Raises:
        UserError: a tensor isn't what was to be written, or `peft` is installed and can't open the adapters.
    """
    ours = run_logits(tokens_BT)
    proof = Proof(tokens_BT.size, tolerance_of(ours))
    _compare_products(folder, spec, lora, parameters)
    if not (version := peft_version()):
        proof.missing = _MISSING
        return proof
    theirs = peft_logits(base, folder, tokens_BT)
    proof.differences[f"the run's model and peft {version}"] = difference(ours, theirs)
    return proof


def _compare_products(folder: Path, spec: ModelSpec, lora: LoraSection, parameters: Parameters) -> None:
    """What each adapter adds to its tensor of the base must be what the whole export adds."""
    written = read_header(folder / TENSORS)
    for place in _places(adapters_of(spec, lora.targets), parameters):
        (name_a, a_RI), (name_b, b_OR) = (
            (name, read_tensor(name, written.pop(name))) for name in _names(place.module) if name in written
        )
        a_IR, parts = _values(place, parameters)
        meant = write(place.adapter.rules, [a_IR @ b_RO for b_RO in parts])
        added = (b_OR @ a_RI).T if place.adapter.is_turned else b_OR @ a_RI
        if added.shape != meant.shape or not np.allclose(added, meant, rtol=1e-4, atol=1e-6 * np.abs(meant).max()):
            raise UserError(f"{folder}: {name_a} and {name_b} don't make what the run's adapter is")
    if written:
        raise UserError(f"{folder}: holds other tensors than were to be written")


def _places(adapters: list[Adapter], parameters: Parameters) -> Iterator[_Place]:
    for adapter in adapters:
        shape = parameters.shapes[adapter.rules[0].ours]
        for layer, name in adapter.rules[0].tensors(shape):
            yield _Place(name.rpartition(".")[0], adapter, layer)


def _names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _values(place: _Place, parameters: Parameters) -> tuple[np.ndarray, list[np.ndarray]]:
    """`a`, `[I, R]`, and of each part `b`, `[R, O]`."""
    maps = place.adapter.maps
    a_IR = parameters.read(a_of(maps, parameters.shapes), place.layer)
    return a_IR, [parameters.read(f"{path}.lora.b", place.layer) for path in maps]


def _tensors(place: _Place, parameters: Parameters) -> list[tuple[str, np.ndarray]]:
    a_IR, parts = _values(place, parameters)
    # A rule turns and orders what comes out of a map, of which `b` has as much as the kernel has.
    b = write(place.adapter.rules, parts)
    return list(zip(_names(place.module), (a_IR.T, b.T if place.adapter.is_turned else b), strict=True))


def base_name(base: str) -> str:
    """What `peft` calls the checkpoint that adapters belong to.

    Arguments:
        base: as `model.init` has it.

    Raises:
        UserError: it is a run, and no checkpoint that `peft` opens.
    """
    if not base.startswith("hf:"):
        raise UserError(
            f"adapter: they belong to the checkpoint of a run, {base}, which peft can't open; export the whole model "
            "(without --adapter)"
        )
    return base.removeprefix("hf:")


def about(lora: LoraSection, spec: ModelSpec, count: int) -> dict[str, str]:
    """For the model card: what was trained."""
    scaled = ", rsLoRA" if lora.rslora else ""
    names = ", ".join(f"`{name}`" for name in target_names(spec, adapters_of(spec, lora.targets)))
    base = "" if lora.quantize == "none" else "; their base was in 4 bits (NF4)"
    return {
        "adapters (LoRA)": f"{count:,} parameters of rank {lora.rank}, alpha {lora.alpha:g}{scaled}, on {names}{base}"
    }
