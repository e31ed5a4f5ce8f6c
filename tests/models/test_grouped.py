"""The products of experts for GPUs, interpreted on the CPU, against every row's own product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import grouped, moe
from meshwright.models.grouped import BLOCK, Tile
from meshwright.models.moe import ExpertKernels

WIDTH, INNER, EXPERTS = 128, 256, 3
CHOICES = {
    "spread": np.random.default_rng(5).integers(0, EXPERTS, 400),
    "all of one": np.full(300, 1),
    "one without rows": np.random.default_rng(6).integers(0, 2, 257) * 2,
    "rows of none": np.random.default_rng(7).integers(0, EXPERTS + 1, 300),
    "whole blocks": np.repeat(np.arange(EXPERTS), BLOCK),
}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def kernels_of(activation):
    gate = random(EXPERTS, WIDTH, INNER, seed=1) / 8 if activation == "swiglu" else None
    up, down = random(EXPERTS, WIDTH, INNER, seed=2) / 8, random(EXPERTS, INNER, WIDTH, seed=3) / 8
    return ExpertKernels(gate, up, down, activation)


def placed(name):
    expert = jnp.asarray(CHOICES[name])
    order, place, bounds = moe._sorted_by_expert(expert, jnp.arange(len(expert)), EXPERTS)
    return expert, grouped.places(order, place, bounds, expert)


def plain(x, expert, kernels):
    mine = [jnp.take(kernel, expert, axis=0, mode="fill", fill_value=0) for kernel in jax.tree.leaves(kernels)]
    products = [jnp.einsum("RD,RDF->RF", x, kernel) for kernel in mine[:-1]]
    return jnp.einsum("RF,RFD->RD", kernels.activated(*products), mine[-1])


def assert_near(got, wanted, tolerance=1e-5):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert np.abs(wanted).max() > 0.1
    assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", CHOICES)
def test_each_row_has_a_slot_in_a_block_of_its_expert(name):
    expert, places = placed(name)
    source, target, block = (np.asarray(x) for x in (places.source_S, places.target_R, places.expert_B))
    rows, slots = len(expert), len(source)
    for row in range(rows):
        if expert[row] == EXPERTS:
            assert target[row] == slots
        else:
            assert source[target[row]] == row
            assert block[target[row] // BLOCK] == expert[row]
    assert (source == rows).sum() == slots - (np.asarray(expert) < EXPERTS).sum()
    assert slots % BLOCK == 0
    assert len(block) * BLOCK == slots
    for number in range(EXPERTS):
        assert (block[places.first_E1[number] : places.first_E1[number + 1]] == number).all()
    assert (block[places.first_E1[-1] :] == EXPERTS).all()


@pytest.mark.parametrize(("name", "activation"), [*((name, "swiglu") for name in CHOICES), ("spread", "gelu")])
def test_rows_through_their_experts_and_the_gradients(name, activation, monkeypatch):
    expert, kernels = jnp.asarray(CHOICES[name]), kernels_of(activation)
    x, dy = random(len(expert), WIDTH, seed=8), random(len(expert), WIDTH, seed=9)
    called, call = [], grouped.call
    monkeypatch.setattr(grouped, "applies", lambda *_: True)
    monkeypatch.setattr(
        grouped, "call", lambda kernel, *rest, **more: called.append(kernel) or call(kernel, *rest, **more)
    )
    y, back = jax.vjp(lambda x, kernels: moe.through_experts(x, expert, kernels), x, kernels)
    wanted, wanted_back = jax.vjp(lambda x, kernels: plain(x, expert, kernels), x, kernels)
    got, want = jax.tree.leaves((y, back(dy))), jax.tree.leaves((wanted, wanted_back(dy)))
    assert len(called) == 4 + 2 * len(kernels.inward)
    for part, other in zip(got, want, strict=True):
        assert_near(part, other)


@pytest.mark.parametrize("tile", [Tile(64, 32, 4, 1), Tile(256, 64, 8, 3)])
@pytest.mark.parametrize("name", ["one without rows", "rows of none"])
def test_every_element_is_written(tile, name):
    # Interpreted, what a kernel leaves out holds NaN.
    _, places = placed(name)
    slots = len(places.source_S)
    x, y = random(slots, WIDTH), random(slots, INNER, seed=1)
    product = grouped.by_kernels(places.expert_B, [x], [random(EXPERTS, WIDTH, INNER, seed=2)], tile)
    empty = np.repeat(np.asarray(places.expert_B) == EXPERTS, BLOCK)
    assert np.isfinite(product).all()
    assert empty.any()
    assert not np.asarray(product)[empty].any()
    assert np.abs(np.asarray(product)[~empty]).sum(axis=1).min() > 0
    sums = np.asarray(grouped.over_rows(places.first_E1, x, y, tile))
    assert np.isfinite(sums).all()
    for expert in range(EXPERTS):
        here = slice(*(int(places.first_E1[expert + i]) * BLOCK for i in (0, 1)))
        np.testing.assert_allclose(sums[expert], x[here].T @ y[here], rtol=1e-4, atol=1e-4)


def test_they_are_left_out_on_a_cpu():
    assert not grouped.applies(random(2000, WIDTH).astype(jnp.bfloat16), random(EXPERTS, WIDTH, INNER))


def test_triton_takes_them(monkeypatch):
    # The interpreter takes more than Triton does; lowering for a GPU needs none.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _, places = placed("spread")
    slots = len(places.source_S)
    x, y, kernel = (
        random(*shape).astype(jnp.bfloat16) for shape in ((slots, WIDTH), (slots, INNER), (EXPERTS, WIDTH, INNER))
    )

    def both(x, y):
        return grouped.by_kernels(places.expert_B, [x], [kernel]), grouped.over_rows(places.first_E1, x, y)

    text = jax.jit(both).trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2
