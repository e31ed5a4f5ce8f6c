"""What a run takes, found from shapes: against counts by hand, what JAX keeps, and what XLA counts."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_values

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.flops import head_widths, multiplied_parameters
from meshwright.engines.jax import memory_check
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.estimate import (
    Share,
    _is_fused,
    bytes_of,
    estimate,
    flops_per_token,
    human_bytes,
    layer_bytes,
)
from meshwright.engines.jax.memory_check import compiled_bytes, device_memory, fitting_train_step
from meshwright.engines.jax.program import Program
from meshwright.errors import UserError
from meshwright.models import flash, kernels
from meshwright.models.decoder import Decoder, active_parameter_count, parameter_count
from meshwright.models.spec import preset

# XLA may keep other things than the forward pass names; for what is measured here it stays within this.
FACTOR = 1.2


def make(model: dict | None = None, **sections):
    sections["train"] = {"scan_layers": True, **sections.get("train", {})}
    return make_run(run_values("x", model={"vocab_size": 61, **(model or {})}, **sections))


def program_of(run) -> Program:
    return Program(run, run.model.spec, model=Decoder)


@pytest.mark.parametrize(
    ("model", "sections", "is_fused"),
    [
        ({"preset": "llama-tiny", "kv_heads": 2}, {}, True),
        ({"preset": "llama-tiny", "kv_heads": 2, "window": 8}, {}, False),  # in a loop it isn't known
        ({"preset": "llama-tiny", "kv_heads": 2, "window": 8}, {"scan_layers": False}, True),
        ({"preset": "llama-tiny", "kv_heads": 2, "attention_softcap": 5.0}, {}, False),
        ({"preset": "llama-tiny", "kv_heads": 2}, {"sequence_length": 31}, False),
        ({"preset": "deepseek-tiny", "dense_layers": 1, "dense_ffn_width": 64}, {"deterministic": True}, False),
        ({"preset": "deepseek-tiny"}, {"sequence_length": 64}, True),  # whose values are padded
    ],
)
def test_a_fused_kernel_keeps_no_weights(monkeypatch, model, sections, is_fused):
    run = make(model, train=sections)
    program = program_of(run)
    plain = estimate(run, run.model.spec, program.mesh, program.state, jnp.bfloat16)

    def has_a_kernel(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring):
        return q_BTHC.shape[1] % 2 == 0 and not scoring.softcap

    monkeypatch.setattr(flash, "applies", has_a_kernel)
    fused = estimate(run, run.model.spec, program.mesh, program.state, jnp.bfloat16)
    spec, time = run.model.spec, run.train.sequence_length
    wider = max(head_widths(spec)) - head_widths(spec)[1]  # of values and outputs, in the kernel
    a_head = time * 2 - 4 - 2 * 2 * wider  # a log-sum-exp is float32
    saved = run.micro_batch_size * time * spec.heads * a_head if is_fused else 0
    assert plain.activations - fused.activations == spec.layers * saved
    assert (saved > 0) == is_fused
    on_stages = _is_fused(run, spec, {"pipeline": 2}, jnp.bfloat16)  # where a layer doesn't know its window, either
    assert on_stages == (is_fused and not spec.window)


def test_no_kernels_are_joined_on_a_gpu(monkeypatch):
    run = make(train={"scan_layers": True})
    program = program_of(run)

    def kernels() -> int:
        return estimate(run, run.model.spec, program.mesh, program.state, jnp.float32).kernels

    assert kernels() > 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels() == 0


@pytest.mark.parametrize(
    ("model", "sections", "by_kernel"),
    [
        ({}, {"train": {"compute_dtype": "bfloat16"}}, True),
        ({}, {}, False),
        ({"final_softcap": 30.0}, {"train": {"compute_dtype": "bfloat16"}}, False),
    ],
)
def test_scores_for_a_kernel_take_half_as_much_and_the_head_twice(monkeypatch, model, sections, by_kernel):
    run = make({"vocab_size": 100_000, **model}, **sections)
    program = program_of(run)
    monkeypatch.setattr(kernels, "capability", lambda: 9.0)
    work = estimate(run, program.spec, program.mesh, program.state, program.dtype).work
    tokens = run.train.batch_size * run.train.sequence_length
    assert work == 100_000 * (4 * (tokens + program.spec.width) if by_kernel else 8 * tokens)
    # Of half as much there are twice as many at a time.
    monkeypatch.setattr("meshwright.engines.jax.estimate.loss_chunk", lambda vocab: tokens // 4)
    work = estimate(run, program.spec, program.mesh, program.state, program.dtype).work
    assert work == 100_000 * (4 * (tokens // 2 + program.spec.width) if by_kernel else 8 * tokens // 4)


def test_flops_of_gpt2_by_hand():
    spec = preset("gpt2").model_copy(update={"vocab_size": 50257})
    norms = 2 * 2 * 768
    attention = (768 * 3 * 768 + 3 * 768) + (768 * 768 + 768)
    feed_forward = (768 * 3072 + 3072) + (3072 * 768 + 768)
    multiplied = 12 * (norms + attention + feed_forward) + 2 * 768 + 50257 * 768
    assert multiplied_parameters(spec, active_parameter_count(spec)) == multiplied == 123_653_376
    assert parameter_count(spec) == multiplied + 1024 * 768 == 124_439_808
    assert flops_per_token(spec, 1024) == 6 * multiplied + 12 * 12 * 12 * 64 * 1024 == 855_166_464


def test_flops_leave_out_what_is_looked_up_and_experts_not_chosen():
    untied = preset("minigpt").model_copy(update={"vocab_size": 1000})
    assert (
        multiplied_parameters(untied, active_parameter_count(untied))
        == parameter_count(untied) - 1000 * 256 - 256 * 256
    )
    experts = preset("moe-tiny").model_copy(update={"vocab_size": 1000})
    unused = 4 * (4 - 2) * 3 * 128 * 176  # layers, experts not chosen, their three kernels
    assert multiplied_parameters(experts, active_parameter_count(experts)) == parameter_count(experts) - unused
    latent = preset("deepseek-tiny").model_copy(update={"vocab_size": 1000})
    square = flops_per_token(latent, 256) - flops_per_token(latent, 0)
    assert square == 12 * 4 * 4 * ((32 + 16) + 32) // 2 * 256  # layers, heads, mean of keys' and values' width


def kept_by_jax(spec, dtype, remat: str, rows: int, time: int) -> int:
    """Bytes that the gradient of one layer keeps, those of parameters among them."""

    def layer():
        model = Decoder(spec, rngs=nnx.Rngs(0))
        params = jax.tree.map(lambda leaf: leaf[0], nnx.split(model.blocks)[1])
        rows_BTD = model.embedded(jnp.zeros((rows, time), jnp.int32), dtype)
        start = model.start(rows_BTD, None, None, None, dtype, None)
        told = jax.tree.map(lambda leaf: leaf[0], start.told_L)
        apply = model.layer_function(remat)
        return jax.vjp(lambda params, x: apply(params, x, start.places, told)[0], params, start.x_BTD)[1]

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(layer)))


@pytest.mark.parametrize("remat", ["none", "products", "full"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2-tiny", {}),
        ("llama-tiny", {}),
        ("minigpt-tiny", {"dropout": 0.0, "activation": "gelu"}),
        ("moe-tiny", {}),
        ("moe-tiny", {"capacity_factor": 1.5}),
        ("deepseek-tiny", {}),
        ("deepseek-tiny", {"query_latent": 0, "value_width": 24}),
        ("qwen3-tiny", {}),
        ("gemma2-tiny", {}),
        ("gemma3-tiny", {}),
        ("olmo2-tiny", {}),
    ],
)
def test_a_layer_keeps_what_the_formula_says(name, changes, dtype, remat):
    spec = preset(name).model_copy(update={"vocab_size": 61, "layers": 2, **changes})
    rows, time = 4, 96
    whole = {"tensor": 1, "experts": 1, "flash": False, "value_width": head_widths(spec)[1]}
    share = Share(rows * time, time, jnp.dtype(dtype).itemsize, **whole)
    kept = kept_by_jax(spec, dtype, remat, 2 * rows, time) - kept_by_jax(spec, dtype, remat, rows, time)
    assert rows * time * layer_bytes(spec, share, remat) == pytest.approx(
        kept, rel=0.02
    )  # a router's own sums are left out


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_the_estimate_is_near_what_xla_counts(name, remat):
    run = make({"preset": name, "layers": 4, "width": 64}, train={"remat": remat, "sequence_length": 64})
    program = program_of(run)
    by_analysis = estimate(run, program.spec, program.mesh, program.state, program.dtype)
    by_xla = compiled_bytes(program.compile_train_step())
    assert 1 / FACTOR < by_xla / by_analysis.total < FACTOR
    assert by_analysis.parameters == 4 * parameter_count(program.spec)
    assert by_analysis.state == bytes_of(program.state.shapes)


def test_accumulation_needs_the_gradients_twice():
    once, twice = (
        estimate(run, program.spec, program.mesh, program.state, program.dtype)
        for run in (make(), make(train={"micro_batch_size": 2}))
        for program in [program_of(run)]
    )
    assert twice.gradients == 2 * once.gradients == 8 * parameter_count(make().model.spec)
    assert twice.activations == once.activations / 2


def test_memory_of_a_cpu_is_shared_by_its_devices_and_processes(monkeypatch):
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device_memory() == there // jax.local_device_count()
    assert device_memory(4) == there // jax.local_device_count() // 4
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 7 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert device_memory(4) == 7 * 2**30
    gpu.memory_stats = lambda: None
    assert device_memory() is None


def refused(monkeypatch, program, memory: int) -> str:
    monkeypatch.setattr(memory_check, "device_memory", lambda processes: memory)
    with pytest.raises(UserError) as error:
        fitting_train_step(program)
    return str(error.value)


def test_a_state_that_does_not_fit_is_refused_before_compiling(monkeypatch):
    program = program_of(make())
    state = bytes_of(program.state.shapes)
    monkeypatch.setattr(program, "compile_train_step", lambda: pytest.fail("compiled"))
    message = refused(monkeypatch, program, state // 4 + 1)
    assert message.startswith(f"mesh.fsdp = 1: parameters and optimizer state alone take {human_bytes(state)}")
    assert f"which has {human_bytes(state // 4 + 1)}; raise it to 4 or more, with as many devices" in message
    assert "raise it to 8 or more" in refused(monkeypatch, program, state // 5)  # 5 to 7 don't divide the width
    for kind in ("parameters", "gradients", "optimizer state", "activations"):
        assert f"{kind} " in message.split("By estimate")[1]


def test_a_step_that_does_not_fit_is_refused_once_compiled(monkeypatch):
    program = program_of(make())
    needed = compiled_bytes(program.compile_train_step())
    message = refused(monkeypatch, program, needed - 1)
    assert message.startswith(f"train.micro_batch_size = 4: the compiled train step takes {human_bytes(needed)} on")
    assert '; lower it or set train.remat = "full" (it is "none") or raise mesh.fsdp = 1. By estimate' in message
    smallest = program_of(make(train={"micro_batch_size": 1, "remat": "full"}))
    assert "; raise mesh.fsdp = 1. By estimate" in refused(
        monkeypatch, smallest, compiled_bytes(smallest.compile_train_step()) - 1
    )

    def gives_up():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")

    monkeypatch.setattr(program, "compile_train_step", gives_up)
    assert "the compiled train step takes more on each device" in refused(monkeypatch, program, needed - 1)
    monkeypatch.undo()
    assert isinstance(fitting_train_step(program), jax.stages.Compiled)


def test_nothing_is_compiled_ahead_where_it_would_not_be_used(monkeypatch):
    program = program_of(make())
    monkeypatch.setattr(program, "compile_train_step", lambda: pytest.fail("compiled"))
    assert fitting_train_step(program, training=False) is program.train_step
    monkeypatch.setattr(memory_check, "device_memory", lambda processes: None)
    assert fitting_train_step(program) is program.train_step


def test_the_step_compiled_for_the_check_is_the_one_that_trains(tmp_path):
    """Neither the first step nor one after a restore compiles again."""
    run = make()
    random = np.random.default_rng(0)
    batch = Batch(*random.integers(0, 61, (2, 4, 32), dtype=np.int32), np.ones((4, 32), np.float32))
    engine = JaxEngine(run, run.model.spec)
    first = float(engine.train_step(batch)["loss"])
    engine.save(tmp_path)()
    second = float(engine.train_step(batch)["loss"])
    again = JaxEngine(run, run.model.spec)
    again.restore(tmp_path)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **more: (
            compiled.append(more.get("fun_name")) if name.endswith("backend_compile_duration") else 0
        )
    )
    try:
        assert float(again.train_step(batch)["loss"]) == second < first
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
