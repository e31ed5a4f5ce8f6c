"""The mixture of experts against a loop over tokens and experts in NumPy, in float64."""

import math
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.models import moe
from meshwright.models.attention import Places
from meshwright.models.decoder import REMAT
from meshwright.models.moe import ExpertKernels, MoE
from meshwright.models.spec import ModelSpec

BATCH, TIME, WIDTH = 2, 10, 6
CAPACITY = {"capacity_factor": 0.8}
QUICK = {"xla_backend_optimization_level": 0}  # most of the time goes into compiling


def spec(**changes) -> ModelSpec:
    sizes = {"width": WIDTH, "heads": 2, "ffn_width": 5, "experts": 4, "experts_per_token": 2}
    return ModelSpec(**{**sizes, "activation": "swiglu", "bias": False, **changes})


def make(spec: ModelSpec, seed: int = 0) -> MoE:
    """Parameters large enough that a wrong expert or weight is seen."""
    return MoE(spec, std=0.5, out_std=0.5, rngs=nnx.Rngs(seed))


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def places(order=None, weights=None, time=TIME) -> Places:
    order = jnp.arange(time) if order is None else jnp.asarray(order)
    return Places(order[None], order, weights_BT=None if weights is None else jnp.asarray(weights))


def some_weights(batch=BATCH) -> np.ndarray:
    return (np.random.default_rng(5).random((batch, TIME)) < 0.7).astype(np.float32)


def apply(model: MoE, x, where: Places | None = None):
    return _apply(*nnx.split(model, nnx.Param), x, places() if where is None else where)


def loss_and_gradients(model: MoE, x, weights=None):
    """The gradient of a sum over tokens, each of which counts as much as its weight."""
    weights = np.ones(x.shape[:2], np.float32) if weights is None else weights
    return _loss_and_gradients(*nnx.split(model, nnx.Param), x, weights)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _apply(graph, params, x, where):
    return nnx.merge(graph, params)(x, where)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _loss_and_gradients(graph, params, x, weights):
    def loss(params, x):
        y, routing = nnx.merge(graph, params)(x, places(weights=weights))
        return (y * random(1, TIME, WIDTH, seed=9) * weights[..., None]).sum() + routing.penalty, (y, routing)

    return jax.value_and_grad(loss, has_aux=True)(params, x)


def naive(model: MoE, x_BTD, weights_BT=None, order_T=None):
    """One token, one choice and one expert at a time."""
    spec, params = model.spec, jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    x_BTD = np.float64(x_BTD)
    batch, time, _ = x_BTD.shape
    weights_BT = np.ones((batch, time)) if weights_BT is None else weights_BT
    order_T = np.arange(time) if order_T is None else order_T
    room = time * spec.experts
    if spec.capacity_factor:
        room = math.ceil(spec.capacity_factor * time * spec.experts_per_token / spec.experts)

    def silu(x):
        return x / (1 + np.exp(-x))

    def activation(x):
        if spec.activation == "relu":
            return np.maximum(x, 0)
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def ffn(x, gate, up, down):
        return (activation(x @ up) if gate is None else silu(x @ gate) * (x @ up)) @ down

    y_BTD, load_E = np.zeros_like(x_BTD), np.zeros(spec.experts)
    balance = size = dropped = 0.0
    for b in range(batch):
        used_E, pairs_E, share_E = np.zeros(spec.experts), np.zeros(spec.experts), np.zeros(spec.experts)
        for t in np.argsort(order_T):
            token, weight = x_BTD[b, t], weights_BT[b, t]
            scores = token @ params["router"]
            favour = np.exp(scores) / np.exp(scores).sum() if spec.router == "softmax" else 1 / (1 + np.exp(-scores))
            chosen = sorted(range(spec.experts), key=lambda e, favour=favour: -favour[e])[: spec.experts_per_token]
            gates = favour[chosen] / favour[chosen].sum() if spec.renormalize else favour[chosen]
            for e, g in zip(chosen, gates, strict=True):
                pairs_E[e] += weight
                if used_E[e] == room:
                    dropped += weight
                    continue
                used_E[e] += 1
                gate = params["gate"][e] if "gate" in params else None
                y_BTD[b, t] += g * ffn(token, gate, params["up"][e], params["down"][e])
            if "shared" in params:
                gate = params["shared"]["gate"]["kernel"] if "gate" in params["shared"] else None
                y_BTD[b, t] += ffn(token, gate, *(params["shared"][name]["kernel"] for name in ("up", "down")))
            share_E += weight * favour / favour.sum()
            size += weight * np.log(np.exp(scores).sum()) ** 2
        load_E += pairs_E
        tokens = weights_BT[b].sum()
        if tokens:
            frequency_E = spec.experts * pairs_E / (tokens * spec.experts_per_token)
            balance += tokens * (frequency_E * share_E / tokens).sum()
    return y_BTD, spec.balance_loss * balance + spec.router_z_loss * size, load_E, dropped


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": False},
        {"router": "sigmoid"},
        {"router": "sigmoid", "renormalize": False},
        {"activation": "gelu"},
        {"activation": "relu", "experts_per_token": 3},
        {"shared_experts": 2},
        {"experts_per_token": 1, "renormalize": False},
        {**CAPACITY},
        {**CAPACITY, "router": "sigmoid", "activation": "gelu", "renormalize": False, "shared_experts": 1},
        {**CAPACITY, "experts_per_token": 3},
    ],
    ids=str,
)
def test_equals_a_naive_numpy_model(changes):
    model, x, weights = make(spec(**changes)), random(BATCH, TIME, WIDTH), some_weights()
    y, routing = apply(model, x, places(weights=weights))
    want_y, want_penalty, want_load, want_dropped = naive(model, x, weights)
    assert np.abs(want_y).max() > 0.5
    np.testing.assert_allclose(y, want_y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(routing.penalty, want_penalty, rtol=1e-5)
    np.testing.assert_array_equal(routing.load_E, want_load)
    assert float(routing.dropped) == want_dropped
    assert (want_dropped > 0) == ("capacity_factor" in changes)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("losses", [{"balance_loss": 1.0, "router_z_loss": 0.0}, {"balance_loss": 0.0}], ids=str)
def test_each_loss_alone(router, losses):
    x = random(BATCH, TIME, WIDTH)
    model = make(spec(router=router, **losses))
    routing = apply(model, x, places())[1]
    np.testing.assert_allclose(routing.penalty, naive(model, x)[1], rtol=1e-5)
    assert float(routing.penalty) > 0.01


def test_balance_is_one_where_all_experts_are_equal():
    losses = {"balance_loss": 1.0, "router_z_loss": 0.0}
    model, x = make(spec(**losses)), random(BATCH, TIME, WIDTH)
    model.router[...] = jnp.zeros_like(model.router[...])
    np.testing.assert_allclose(apply(model, x, places())[1].penalty, BATCH * TIME, rtol=1e-6)
    model = make(spec(experts_per_token=1, **losses))
    model.router[...] = 50.0 * jnp.eye(WIDTH, 4)  # a token goes to the expert whose feature it has
    by_turns = jnp.tile(jnp.eye(4, WIDTH), (1, 3, 1))
    np.testing.assert_allclose(apply(model, by_turns, places(time=12))[1].penalty, 12, rtol=1e-6)
    all_to_one = by_turns[:, :1].repeat(12, axis=1)
    np.testing.assert_allclose(apply(model, all_to_one, places(time=12))[1].penalty, 12 * 4, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_parts_of_a_batch_add_up(changes):
    model, x, weights = make(spec(**changes)), random(2 * BATCH, TIME, WIDTH), some_weights(2 * BATCH)
    (_, (y, routing)), gradients = loss_and_gradients(model, x, weights)
    parts = zip(np.split(np.asarray(x), 2), np.split(weights, 2), strict=True)
    each = [loss_and_gradients(model, *part) for part in parts]
    np.testing.assert_allclose(np.concatenate([y for (_, (y, _)), _ in each]), y, rtol=1e-6, atol=1e-6)
    summed = jax.tree.map(jnp.add, *[routing for (_, (_, routing)), _ in each])
    np.testing.assert_allclose(summed.penalty, routing.penalty, rtol=1e-6)
    np.testing.assert_array_equal(summed.load_E, routing.load_E)
    assert float(summed.dropped) == float(routing.dropped)
    whole = jax.tree.map(jnp.add, *[gradient for _, gradient in each])
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_rows_that_do_not_count_change_nothing(changes):
    model, x, weights = make(spec(**changes)), random(BATCH, TIME, WIDTH), some_weights()
    (loss, (y, routing)), gradients = loss_and_gradients(model, x, weights)
    more_x = np.concatenate([x, random(BATCH, TIME, WIDTH, seed=3)])
    more_weights = np.concatenate([weights, np.zeros((BATCH, TIME), np.float32)])
    (padded_loss, (padded_y, padded_routing)), padded_gradients = loss_and_gradients(model, more_x, more_weights)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(padded_y[:BATCH], y, rtol=1e-6, atol=1e-6)
    assert np.abs(padded_y[BATCH:]).max() > 0.1, "weights are not a mask"
    for got, want in zip(padded_routing, routing, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(padded_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"shared_experts": 1}, {"activation": "gelu"}, {"router": "sigmoid"}, CAPACITY], ids=str
)
def test_every_parameter_learns(changes):
    _, gradients = loss_and_gradients(make(spec(**changes)), random(BATCH, TIME, WIDTH))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert len(leaves) == 4 - (changes.get("activation") == "gelu") + 3 * ("shared_experts" in changes)
    for path, gradient in leaves:
        by_expert = gradient if gradient.ndim == 3 else gradient.T
        assert (np.abs(by_expert).reshape(len(by_expert), -1).max(axis=1) > 1e-4).all(), path


def test_parameters_and_their_axes():
    model = make(spec(shared_experts=2, activation="swiglu"))
    found = {name: (getattr(model, name).shape, getattr(model, name).get_metadata()["axes"]) for name in NAMES}
    assert found == {
        "router": ((6, 4), ("width", None)),
        "gate": ((4, 6, 5), ("experts", "width", "ffn")),
        "up": ((4, 6, 5), ("experts", "width", "ffn")),
        "down": ((4, 5, 6), ("experts", "ffn", "width")),
    }
    assert model.shared.up.kernel.shape == (6, 10)
    assert make(spec(activation="gelu")).gate is None
    wide = MoE(spec(width=64, ffn_width=64), std=0.02, out_std=0.005, rngs=nnx.Rngs(0))
    for name, std in zip(NAMES, (0.02, 0.02, 0.02, 0.005), strict=True):
        assert getattr(wide, name)[...].std() == pytest.approx(std, rel=0.15), name
    kernels = [wide.up[0], wide.up[1], wide.gate[0]]
    assert max(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in pairwise(kernels)) < 0.1


NAMES = ("router", "gate", "up", "down")


def test_all_experts_chosen_are_all_weighed():
    model, x = make(spec(experts_per_token=4, router="softmax", renormalize=False)), random(BATCH, TIME, WIDTH)
    shares_BTE = jax.nn.softmax(x @ model.router[...])
    inner = jax.nn.silu(jnp.einsum("BTD,EDF->BTEF", x, model.gate[...])) * jnp.einsum("BTD,EDF->BTEF", x, model.up[...])
    want = jnp.einsum("BTEF,EFD,BTE->BTD", inner, model.down[...], shares_BTE)
    y, routing = apply(model, x, places())
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(routing.load_E, [BATCH * TIME] * 4)


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_twice_the_same(changes):
    first, second = (
        loss_and_gradients(make(spec(**changes)), random(BATCH, TIME, WIDTH), some_weights()) for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_nothing_dropped_is_dropless():
    x = random(BATCH, TIME, WIDTH)
    (_, (want, _)), gradients = loss_and_gradients(make(spec()), x)
    (_, (y, routing)), got = loss_and_gradients(make(spec(capacity_factor=2.0)), x)  # room for all of a sequence
    assert float(routing.dropped) == 0
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    (_, (y, routing)), _ = loss_and_gradients(make(spec(**CAPACITY)), x)
    assert float(routing.dropped) > 0
    changed_BT = (np.abs(y - want).max(axis=-1) > 1e-3).sum()
    assert 0 < changed_BT <= float(routing.dropped)


@pytest.mark.parametrize(("factor", "room"), [(1.0, 5), (1.1, 6), (0.1, 1), (9.0, 10)])
def test_room_is_rounded_up_to_at_most_the_sequence(factor, room):
    assert moe.expert_room(spec(capacity_factor=factor), TIME) == room


def test_room_goes_by_place_and_not_by_column():
    model, x = make(spec(**CAPACITY)), random(BATCH, TIME, WIDTH)
    order = np.random.default_rng(1).permutation(TIME)
    y, routing = apply(model, x, places())
    moved_y, moved_routing = apply(model, x[:, order], places(order))
    np.testing.assert_allclose(moved_y, y[:, order], rtol=1e-6, atol=1e-6)
    assert float(moved_routing.dropped) == float(routing.dropped)
    as_columns, _ = apply(model, x[:, order], places())
    assert np.abs(as_columns - y[:, order]).max() > 0.1
    np.testing.assert_allclose(moved_y, naive(model, x[:, order], order_T=order)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_no_token_sees_a_later_one(changes):
    model, x = make(spec(**changes)), random(40, TIME, WIDTH)  # many sequences: many ways to lose an expert
    y, routing = apply(model, x, places())
    for time in (3, 6, 8):
        other, other_routing = apply(model, x.at[:, time:].set(random(40, TIME - time, WIDTH, seed=7)), places())
        np.testing.assert_array_equal(other[:, :time], y[:, :time])
        assert not np.array_equal(other_routing.load_E, routing.load_E)


def kernels_of(activation: str, experts=3, width=4, inner=6) -> ExpertKernels:
    gate = random(experts, width, inner, seed=1) if activation == "swiglu" else None
    return ExpertKernels(gate, random(experts, width, inner, seed=2), random(experts, inner, width, seed=3), activation)


def plain_experts(x_BTD, chosen_BTJ, gates_BTJ, kernels: ExpertKernels):
    """All tokens through all experts, for autodiff."""
    products = [jnp.einsum("BTD,EDF->BTEF", x_BTD, kernel) for kernel in kernels.inward]
    y_BTED = jnp.einsum("BTEF,EFD->BTED", kernels.activated(*products), kernels.down_EFD)
    return jnp.einsum("BTJD,BTJ->BTD", jnp.take_along_axis(y_BTED, chosen_BTJ[..., None], axis=2), gates_BTJ)


@pytest.mark.parametrize(("activation", "experts"), [("swiglu", 3), ("swiglu", 5), ("gelu", 3), ("relu", 4)])
def test_gradients_equal_autodiff(activation, experts):
    tokens = 150  # enough for several blocks of an expert, the last of which isn't full
    kernels, x, dy = kernels_of(activation, experts), random(2, tokens, 4), random(2, tokens, 4, seed=4)
    gates, chosen = jax.lax.top_k(jnp.asarray(np.random.default_rng(0).random((2, tokens, 3)), jnp.float32), 2)

    def both(f):
        return jax.value_and_grad(lambda x, gates, kernels: (f(x, chosen, gates, kernels) * dy).sum(), (0, 1, 2))

    _, got = jax.jit(both(moe.whole_experts), compiler_options=QUICK)(x, gates, kernels)
    _, want = jax.jit(both(plain_experts), compiler_options=QUICK)(x, gates, kernels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * float(np.abs(b).max()))


def test_rows_without_an_expert_are_left_out():
    kernels, x, expert = kernels_of("swiglu"), random(40, 4), jnp.arange(40) % 4  # of three: the fourth is none

    @partial(jax.jit, compiler_options=QUICK)
    def run(x, expert):
        y, pull = jax.vjp(lambda x, kernels: moe.through_experts(x, expert, kernels), x, kernels)
        return y, *pull(jnp.ones_like(y))

    y, dx, d_kernels = run(x.at[3::4].set(1e6), expert)
    left_out, others = np.arange(40) % 4 == 3, np.arange(40) % 4 < 3
    assert (np.asarray(y)[left_out] == 0).all()
    assert (np.asarray(dx)[left_out] == 0).all()
    want_y, want_dx, want_d_kernels = run(x[others], expert[others])
    got, want = (y[others], dx[others], d_kernels), (want_y, want_dx, want_d_kernels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_largest_as_jax_finds_them():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, (50, 6)), jnp.float32)  # with ties
    values, places = moe.top_k(x, 3)
    want_values, want_places = jax.lax.top_k(x, 3)
    np.testing.assert_array_equal(places, want_places)
    np.testing.assert_array_equal(values, want_values)
    weights = random(50, 3)
    gradients = [jax.grad(lambda x, f=f: (f(x, 3)[0] * weights).sum())(x) for f in (moe.top_k, jax.lax.top_k)]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_bfloat16_in_bfloat16_out(changes):
    model, x = make(spec(**changes)), random(BATCH, TIME, WIDTH).astype(jnp.bfloat16)
    graph, params = nnx.split(model, nnx.Param)

    @partial(jax.jit, compiler_options=QUICK)
    def run(params, x, dy):
        y, pull, routing = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, places()), params, x, has_aux=True)
        return (y, *jax.tree.leaves(pull(dy))), routing

    dy = random(*x.shape, seed=2).astype(jnp.bfloat16)
    got, routing = run(params, x, dy)
    want, _ = run(params, x.astype(jnp.float32), dy.astype(jnp.float32))
    assert [leaf.dtype for leaf in got] == [jnp.bfloat16] + [jnp.float32] * 4 + [jnp.bfloat16]
    assert {leaf.dtype for leaf in routing} == {jnp.dtype(jnp.float32)}
    for a, b in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert 0 < error < 0.02


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=str)
def test_products_are_not_made_again(changes):
    graph, params = nnx.split(make(spec(**changes)), nnx.Param)
    x = random(BATCH, TIME, WIDTH)

    def products(remat):
        def layer(params, x):
            return nnx.merge(graph, params)(x, places())[0]

        layer = layer if remat == "none" else jax.checkpoint(layer, policy=REMAT[remat])
        traced = jax.make_jaxpr(jax.grad(lambda params, x: (layer(params, x) ** 2).sum(), (0, 1)))(params, x)
        return str(traced).count("dot_general[")

    assert products("full") - products("none") == 4  # the router's, and three of an expert
    assert products("products") - products("none") == 1  # the router's
