"""What the PyTorch engine doesn't have, said before anything is built."""

from typing import Any

from meshwright.config import Run
from meshwright.config_train import MESH_AXES
from meshwright.errors import UserError
from meshwright.models.spec import ANY, ModelSpec

AXES = ("data", "fsdp", "tensor")
"""The axes of its mesh, the one between the most distant devices first."""
ROUTERS = ("mixtral", "qwen3_moe")
"""Families whose routers' losses it computes."""
_DROPPING = ("gpt2", ANY, "minigpt")
"""Families whose classes in `transformers` have dropout, and the one that has no class there, as is said later."""


def check_supported(run: Run, spec: ModelSpec, model: Any, optimizer: Any, metrics: Any) -> None:
    """Refuse what just the JAX engine can do.

    Arguments:
        run, spec: the run and its architecture.
        model, optimizer, metrics: what was given from Python to `meshwright.train`; None: nothing.

    Raises:
        UserError: something is asked for that the PyTorch engine lacks.
    """
    for name, given in (("model", model), ("optimizer", optimizer), ("metrics", metrics)):
        if given:
            raise UserError(f'{name}: is for the JAX engine, where it is Flax and Optax; set engine = "jax"')
    for axis in MESH_AXES:
        if axis not in AXES and (size := getattr(run.mesh, axis)) != 1:
            raise UserError(
                f'mesh.{axis} = {size}: the PyTorch engine has {", ".join(AXES)} alone; set it to 1, or engine = "jax"'
            )
    if run.optimizer.kind not in ("adamw", "lion"):
        raise _not_here("optimizer.kind", run.optimizer.kind, "has adamw and lion")
    if run.train.scan_layers:
        raise _not_here("train.scan_layers", True, "doesn't compile layers in a loop")
    if run.train.float8:
        raise _not_here("train.float8", True, "multiplies in the compute type alone")
    if run.launch.devices_per_worker > 1:
        raise UserError(
            f"launch.devices_per_worker = {run.launch.devices_per_worker}: a process of the PyTorch engine has one "
            "device; leave it out, and set launch.workers to the number of devices"
        )
    if run.train.compile_cache != "auto":
        raise _not_here("train.compile_cache", run.train.compile_cache, "leaves that to TORCHINDUCTOR_CACHE_DIR")
    if spec.dropout and spec.family not in _DROPPING:
        raise _not_here("model.dropout", spec.dropout, f"has none in models of the family {spec.family}; set it to 0")
    if spec.dropout and run.mesh.tensor != 1:
        raise _not_here("model.dropout", spec.dropout, "has none under mesh.tensor")
    if run.lora.quantize != "none":
        _check_quantized(run, spec)
    of_pairs = run.data.packing == "pairs"
    if run.lora.rank and run.mesh.tensor != 1:
        if of_pairs:
            raise UserError(f"mesh.tensor = {run.mesh.tensor}: doesn't cut adapters; raise mesh.fsdp in its place")
        raise _not_here("mesh.tensor", run.mesh.tensor, "doesn't cut adapters")
    if spec.experts and of_pairs:
        raise UserError(
            f"model.experts = {spec.experts}: mixtures of experts, whose routers have losses of their own, aren't "
            f'trained on pairs (data.packing = "{run.data.packing}"); choose another model'
        )
    if spec.experts:
        _check_experts(run, spec)


def _check_quantized(run: Run, spec: ModelSpec) -> None:
    for axis in ("fsdp", "tensor"):
        if (size := getattr(run.mesh, axis)) != 1:
            raise UserError(
                f'mesh.{axis} = {size}: lora.quantize = "{run.lora.quantize}" shares no map out, each '
                "process has them whole; set it to 1, and mesh.data to the number of devices"
            )
    if spec.experts or "expert" in spec.config:
        raise UserError(
            f'lora.quantize = "{run.lora.quantize}": experts, which are most of such a model, aren\'t put into 4 bits; '
            'set it to "none"'
        )


def _check_experts(run: Run, spec: ModelSpec) -> None:
    if spec.capacity_factor:
        raise _not_here("model.capacity_factor", spec.capacity_factor, "drops no token")
    if run.mesh.tensor != 1:
        raise _not_here("mesh.tensor", run.mesh.tensor, "doesn't cut experts")
    for key in ("balance_loss", "router_z_loss"):
        if getattr(spec, key) and spec.family not in ROUTERS:
            raise _not_here(f"model.{key}", getattr(spec, key), f"computes it for {' and '.join(ROUTERS)} alone")


def _not_here(key: str, value: Any, why: str) -> UserError:
    shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    return UserError(f'{key} = {shown}: the PyTorch engine {why}; change it, or set engine = "jax"')
