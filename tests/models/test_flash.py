"""Attention by fused kernels: when, and that what they are asked for is what the plain path computes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from virtual import measured_on_eight_devices, mesh, random

from meshwright.config_train import MESH_AXES
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.sharding import MeshLayout
from meshwright.models import flash
from meshwright.models.attention import whole_attention
from meshwright.models.gradients import Scoring
from meshwright.models.layout import Layout, use_layout
from meshwright.models.spec import preset

SCORING = Scoring(0.3)
PLAIN_KERNEL = jax.nn.dot_product_attention


def arguments(dtype=jnp.bfloat16, time=16, width=8):
    q, k, v = (random(2, time, heads, width, seed=heads).astype(dtype) for heads in (4, 2, 2))
    return q, k, v


def on_a_gpu(patch):
    """Let JAX say that it has a GPU, and answer for cuDNN with its own formulas."""
    called = []

    def kernel(*arrays, implementation, **more):
        called.append(implementation)
        return PLAIN_KERNEL(*arrays, implementation="xla", **more)

    patch.setattr(jax, "default_backend", lambda: "gpu")
    patch.setattr(jax.nn, "dot_product_attention", kernel)
    return called


@pytest.mark.parametrize("segments", [None, [[0] * 6 + [1] * 10, [0] * 16]])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_the_kernel_is_asked_for_what_the_plain_path_computes(window, segments, monkeypatch):
    q, k, v = arguments()
    segments = None if segments is None else jnp.asarray(segments)
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    expected = whole_attention(*exact, segments, window, SCORING)
    called = on_a_gpu(monkeypatch)
    got = flash.fused_attention(q, k, v, segments, window, SCORING)
    assert set(called) == {"cudnn"}
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
def test_values_of_another_width_than_keys(widths, monkeypatch):
    key_width, value_width = widths
    (q, k, _), (*_, v) = arguments(width=key_width), arguments(width=value_width)
    expected = whole_attention(*(x.astype(jnp.float32) for x in (q, k, v)), None, None, SCORING)
    called = on_a_gpu(monkeypatch)
    got = flash.fused_attention(q, k, v, None, None, SCORING)
    assert called and got.shape == (*q.shape[:3], value_width)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0.03, atol=0.03)


def test_where_it_applies(monkeypatch):
    q, k, v = arguments()
    assert not flash.applies(q, k, v, None, None, SCORING)  # on a CPU
    on_a_gpu(monkeypatch)
    assert flash.applies(q, k, v, None, None, SCORING)
    assert flash.applies(q, k, v, jnp.zeros((2, 16), int), 5, SCORING)
    assert not flash.applies(*arguments(jnp.float32), None, None, SCORING)
    assert not flash.applies(*arguments(time=15), None, None, SCORING)
    assert not flash.applies(q, k, v, None, None, Scoring(0.3, softcap=20.0))
    assert not jax.jit(lambda window: jnp.asarray(flash.applies(q, k, v, None, window, SCORING)))(5)
    without = Layout()
    without.fused_attention = False
    with use_layout(without):
        assert not flash.applies(q, k, v, None, None, SCORING)


def test_what_jax_refuses_goes_the_plain_way(monkeypatch):
    q, k, v = arguments()
    on_a_gpu(monkeypatch)

    def refuse(*arrays, **more):
        raise NotImplementedError("the head's width")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    assert flash.fused_attention(q, k, v, None, None, SCORING) is None
    assert whole_attention(q, k, v, None, None, SCORING).shape == q.shape


def measure() -> dict[str, list[float]]:
    """On eight devices: outputs and gradients with the kernel on each device's share, and without."""
    sizes = {**dict.fromkeys(MESH_AXES, 1), "data": 2, "fsdp": 2, "tensor": 2}
    run_mesh = RunMesh(sizes, mesh(sizes), 1)
    spec = preset("llama-tiny")
    q, k, v = (random(4, 16, heads, 8, seed=heads) for heads in (4, 2, 2))
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (4, 16))))
    found, calls = {}, []

    def run(q, k, v):
        with use_layout(MeshLayout(run_mesh, spec)):
            from meshwright.models.layout import layout

            def total(q, k, v):
                return jnp.square(layout().attention(q, k, v, segments, 5, SCORING)).sum()

            return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    def kernel(q, *rest, **more):
        calls.append(q.shape)
        return PLAIN_KERNEL(q, *rest, **more)

    for arm in ("plain", "fused"):
        if arm == "fused":
            flash.applies = lambda *_: True
            flash._kernel = lambda q, k, v, mask, window, scale: kernel(
                q, k, v, mask=mask, is_causal=True, scale=scale, local_window_size=(window - 1, 0)
            )
        with jax.set_mesh(run_mesh.mesh):
            loss, gradients = jax.jit(lambda *x: run(*x))(q, k, v)
        found[arm] = np.concatenate([np.ravel(loss), *(np.ravel(g) for g in gradients)]).tolist()
    found["shapes"] = sorted(set(calls))
    return found


def test_on_a_mesh_each_device_runs_the_kernel_on_its_share():
    found = measured_on_eight_devices(__file__)
    assert [1, 16, 2, 8] in found["shapes"]  # of 4 rows and 4 heads
    np.testing.assert_allclose(found["fused"], found["plain"], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
