"""What a run would do and take, in words, before any of it is allocated: `meshwright plan`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from meshwright.config import Run
from meshwright.data.store import Store, is_store
from meshwright.data.tokenizer import open_tokenizer
from meshwright.engines.flops import head_widths, multiplied_parameters
from meshwright.engines.jax.estimate import (
    Estimate,
    abstract_mesh,
    bytes_of,
    count_of,
    estimate,
    flops_per_token,
    human_bytes,
)
from meshwright.engines.jax.memory_check import compiled_bytes, device_memory
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.optimizer import make_optimizer
from meshwright.engines.jax.pipeline import bubble
from meshwright.engines.jax.program import Program, compute_dtype
from meshwright.engines.jax.rules import ACTIVATIONS, PARAMETERS, PASSING
from meshwright.engines.jax.state import StatePlan, plan_state
from meshwright.engines.jax.step import uses_float8
from meshwright.engines.jax.trained import model_of
from meshwright.models.decoder import Decoder, active_parameter_count
from meshwright.models.spec import ModelSpec
from meshwright.track.text import short

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Plan:
    """What is known of a run beforehand; `str` of it is the text that `meshwright plan` prints."""

    run: Run
    spec: ModelSpec
    """The architecture, with its vocabulary."""
    devices: int
    """How many the run is to have."""
    mesh: RunMesh
    state: StatePlan
    dtype: jnp.dtype
    """The type that activations are computed in."""
    estimate: Estimate
    """Bytes on each device, found by analysis."""
    xla_bytes: int | None
    """Bytes on each device by XLA's count; None: not available."""
    xla_missing: str
    """Why not."""
    memory: int | None
    """Bytes that a device has; None: not known, or those devices aren't here."""

    @property
    def parameters_per_device(self) -> int:
        """Numbers that one device holds; padding of the vocabulary counted."""
        return count_of(self.state.shapes.params, self.state.shardings and self.state.shardings.params)

    @property
    def tokens_per_step(self) -> int:
        """Of a global batch."""
        return self.run.train.batch_size * self.run.train.sequence_length

    @property
    def adapters(self) -> int:
        """Parameters of adapters."""
        return self.state.trained_parameters if self.run.lora.rank else 0

    @property
    def flops_per_token(self) -> int:
        """See `meshwright.engines.flops.training_flops`."""
        return flops_per_token(self.spec, self.run.train.sequence_length, self.adapters)

    @property
    def checkpoint_bytes(self) -> int:
        """The state without parameters that aren't trained."""
        return bytes_of(self.state.shapes._replace(params=self.state.trained.of(self.state.shapes.params)))

    @property
    def bubble(self) -> float:
        """The share of its time in which a stage of the pipeline has nothing to do."""
        return bubble(self.mesh.sizes["pipeline"], self.mesh.rounds, self.mesh.accumulate)

    def __str__(self) -> str:
        sections = {
            f"plan of {self.run.name}": _layout(self),
            "model": _model(self),
            "memory of each device, by analysis": _memory(self),
            "memory of each device, by XLA's count": _xla(self),
        }
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        lines = []
        for title, rows in sections.items():
            lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
        return "\n".join(lines)


def make_plan(run: Run, *, devices: int | None = None, compiled: bool = True) -> Plan:
    """Plan a run. No data is prepared and no array made.

    Arguments:
        run: a checked run file.
        devices: how many the run is to have; None: as many as it would have here. Where they aren't here, XLA's count
            isn't available.
        compiled: whether to compile the train step for XLA's count.

    Raises:
        UserError: the mesh fits neither the devices nor the model or the batch, or the tokenizer can't be had.
    """
    spec = _with_vocabulary(run)
    here = jax.device_count()
    devices = devices or _devices_of(run, here)
    mesh, dtype = abstract_mesh(run, spec, devices), compute_dtype(run)
    model, adapters = model_of(run, Decoder), run.lora.rank > 0
    state = plan_state(model, spec, run, mesh, make_optimizer(run), adapters=adapters)
    missing = "left out, as asked" if not compiled else ""
    if devices != here:
        missing = f"not available: the run has {devices} devices, here there {'is' if here == 1 else 'are'} {here}"
    xla_bytes = None
    if not missing:
        xla_bytes = compiled_bytes(Program(run, spec, model=Decoder).compile_train_step())
        missing = "" if xla_bytes is not None else f"not available: {jax.default_backend()} doesn't give it"
    return Plan(
        run=run,
        spec=spec,
        devices=devices,
        mesh=mesh,
        state=state,
        dtype=dtype,
        estimate=estimate(run, spec, mesh, state, dtype),
        xla_bytes=xla_bytes,
        xla_missing=missing,
        memory=device_memory(run.launch.processes_here) if devices == here else None,
    )


def _with_vocabulary(run: Run) -> ModelSpec:
    spec = run.model.spec
    if spec.vocab_size:
        return spec
    return spec.model_copy(update={"vocab_size": _vocabulary(run)})


def _vocabulary(run: Run) -> int:
    sources = [one.source for one in run.data.sources]
    for source in sources:
        if is_store(source):
            return Store.open(source).manifest["tokenizer"]["vocab_size"]
    if sources[0].endswith(".bin") and run.tokenizer == type(run.tokenizer)():
        return open_tokenizer("tiktoken:gpt2").vocab_size  # as `prepare` takes it
    if run.tokenizer.kind == "bpe":
        return run.tokenizer.vocab_size
    return open_tokenizer(run.tokenizer.kind).vocab_size


def _devices_of(run: Run, here: int) -> int:
    launch = run.launch
    if launch.kind == "local":
        return here
    if launch.devices_per_worker:
        return launch.processes * launch.devices_per_worker
    return launch.processes * here if jax.default_backend() == "cpu" else here


def _layout(plan: Plan) -> Rows:
    run, mesh = plan.run, plan.mesh
    t, processes = run.train, max(jax.process_count(), run.launch.processes)
    here, kind = jax.device_count(), jax.devices()[0].device_kind
    devices = f"{plan.devices} x {kind}" if plan.devices == here else f"{plan.devices} (here: {here} x {kind})"
    rows = [("devices", f"{devices}, in {processes} process{'es' if processes > 1 else ''}")]
    rows += [(f"{axis} {size}", _cuts(plan, axis)) for axis, size in mesh.sizes.items() if size > 1]
    micro = f", in {mesh.accumulate} micro-batches of {run.micro_batch_size}" if mesh.accumulate > 1 else ""
    batch = f"{t.batch_size} sequences of {t.sequence_length} = {plan.tokens_per_step:,} tokens a step{micro}"
    rows.append(("batch", batch))
    if (stages := mesh.sizes["pipeline"]) > 1:
        ticks = f"({stages} - 1) / ({mesh.accumulate} micro-batches x {mesh.rounds} + {stages} - 1)"
        rows.append(("bubble", f"{plan.bubble:.1%} of a stage's time: {ticks}"))
    more = ", products in float8" if uses_float8(run, plan.dtype) else ""
    if plan.devices != here and t.compute_dtype == "auto" and jax.default_backend() == "cpu":
        more = ', as on CPUs; for accelerators set train.compute_dtype = "bfloat16"'
    return [*rows, ("computes in", f"{plan.dtype.name}{more}")]


def _cuts(plan: Plan, axis: str) -> str:
    has = {name for names in jax.tree.leaves(plan.state.axes, is_leaf=lambda v: isinstance(v, tuple)) for name in names}
    if plan.spec.kv_heads % plan.mesh.sizes["tensor"]:
        has.discard("kv_heads")
    parameters = [name for name, along in PARAMETERS.items() if axis in along and name in has]
    activations = [
        name.replace("_", " ")
        for name, along in ACTIVATIONS.items()
        if axis in along and name not in PASSING and ("expert" not in name or plan.spec.experts)
    ]
    cut = (("parameters", parameters), ("activations", activations))
    return "cuts " + "; ".join(f"{what} along {', '.join(names)}" for what, names in cut if names)


def _model(plan: Plan) -> Rows:
    spec, length = plan.spec, plan.run.train.sequence_length
    rows = [("parameters", f"{plan.state.parameters:,}; {plan.parameters_per_device:,} on each device")]
    if spec.experts:
        rows.append(("active", f"{active_parameter_count(spec):,} for each token"))
    if plan.adapters:
        rows.append(("trained", f"{plan.adapters:,} more, of adapters of rank {plan.run.lora.rank}"))
    width = f"({' + '.join(map(str, head_widths(spec)))}) / 2"
    times, adapters = (4, f"6 x {plan.adapters:,} of adapters + ") if plan.adapters else (6, "")
    formula = (
        f"{times} x {multiplied_parameters(spec, active_parameter_count(spec)):,} parameters + {adapters}"
        f"12 x {spec.layers} layers x {spec.heads} heads x {width} x {length} tokens"
    )
    return [
        *rows,
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("a token", f"{short(plan.flops_per_token)} FLOPs = {formula}"),
        ("", "all active parameters but tables that are looked up, not multiplied; attention over the whole square"),
        ("a step", f"{short(plan.flops_per_token * plan.tokens_per_step)} FLOPs, {plan.tokens_per_step:,} tokens"),
        ("a checkpoint", human_bytes(plan.checkpoint_bytes)),
    ]


def _memory(plan: Plan) -> Rows:
    sizes, remat = plan.estimate, plan.run.train.remat
    twice = ", and their sum over micro-batches" if plan.mesh.accumulate > 1 else ""
    table = [
        ("parameters", sizes.parameters, ""),
        ("gradients", sizes.gradients, f"float32{twice}"),
        ("optimizer state", sizes.optimizer, plan.run.optimizer.kind),
        ("activations", sizes.activations, f"estimate: kept for the backward pass, train.remat = {remat}"),
        ("kernels", sizes.kernels, "estimate: parameters gathered along fsdp, or joined, for their products"),
        ("head", sizes.head, "estimate: its gradient's sum over chunks; the residual stream there"),
        ("work", sizes.work, "estimate: a layer's backward pass, or a chunk's scores and their gradient"),
        ("total", sizes.total, "" if plan.xla_bytes else _fits(sizes.total, plan.memory)),
    ]
    return [(name, f"{human_bytes(size):>10}  {what}".rstrip()) for name, size, what in table if size]


def _xla(plan: Plan) -> Rows:
    if plan.xla_bytes is None:
        return [("total", plan.xla_missing)]
    compared = f"{plan.xla_bytes / plan.estimate.total:.2f} times the estimate"
    fits = _fits(plan.xla_bytes, plan.memory)
    rows = [("total", f"{human_bytes(plan.xla_bytes):>10}  {compared}{'; ' if fits else ''}{fits}")]
    if jax.default_backend() == "cpu":
        rows += [("", f"{'':>10}  {note}") for note in _cpu_notes(plan)]
    return rows


def _fits(needed: int, memory: int | None) -> str:
    if memory is None:
        return ""
    return f"{'fits' if needed <= memory else 'does not fit'} the {human_bytes(memory)} of a device"


def _cpu_notes(plan: Plan) -> list[str]:
    train, notes = plan.run.train, []
    if train.remat != "none" and not train.scan_layers and plan.mesh.sizes["pipeline"] == 1:
        notes.append("on a CPU, train.remat saves nothing unless train.scan_layers is true")
    if plan.dtype == jnp.bfloat16:
        notes.append("a CPU computes bfloat16 in float32")
    return notes
