"""Products in float8 beside the exact ones.

A number of e4m3 is off by half a step at most, and the step is between 2^-4 and 2^-3 of it, as its 3 bits of mantissa
stand for 1 to 1.875. Of errors that are even between the two ends, the root of the mean square is 1 / sqrt(3) of that;
and two factors, off each by itself, make it sqrt(2) times as much. So by norm a product is off by more than `LEAST` and
less than `MOST`, whatever its numbers, if they are many.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.models import float8, gradients, kernels
from meshwright.models.layers import Linear, LowRank, fused_linear

LEAST, MOST = (2 ** (1 / 2) * 2.0**bits / 3 ** (1 / 2) for bits in (-5, -4))
FAN_IN, FAN_OUT = 96, 160


def random(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def given(dtype=jnp.bfloat16):
    """`x`, a kernel, and the gradient of the result; rows of all of them are of unlike size."""
    tokens = jnp.geomspace(1e-3, 1e3, 12).reshape(2, 6, 1).astype(dtype)
    kernel = random(FAN_IN, FAN_OUT, seed=1, dtype=jnp.float32) * jnp.geomspace(0.01, 1, FAN_OUT)
    return tokens * random(2, 6, FAN_IN, dtype=dtype), kernel, random(2, 6, FAN_OUT, seed=2, dtype=dtype) / tokens


def with_gradients(linear, x, kernel, dy):
    y, pull = jax.vjp(linear, x, kernel)
    return y, *pull(dy)


def off(got, wanted):
    """By norm of each token, on average: the largest don't count for all."""
    got, wanted = (np.asarray(array, np.float64) for array in (got, wanted))
    return np.mean(np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_it_is_off_by_what_three_bits_of_mantissa_make(dtype):
    arguments = given(dtype)
    y, dx, d_kernel = jax.jit(with_gradients, static_argnums=0)(float8.linear, *arguments)
    *_, usual = jax.jit(with_gradients, static_argnums=0)(gradients.linear, *arguments)
    x, kernel, dy = (np.asarray(array, np.float64) for array in arguments)
    assert LEAST < off(y, x @ kernel) < MOST
    assert LEAST < off(dx, dy @ kernel.T) < MOST
    assert (y.dtype, dx.dtype, d_kernel.dtype) == (dtype, dtype, jnp.float32)
    np.testing.assert_array_equal(d_kernel, usual)


def test_what_fits_into_float8_is_exact():
    """Whole numbers up to 7, of which the largest becomes 448 = 64 x 7."""
    random_numbers = np.random.default_rng(0)
    x, kernel = random_numbers.integers(-7, 8, (5, 8)), random_numbers.integers(-7, 8, (8, 6))
    x[:, 0], kernel[0], kernel[:, 0] = 7, 7, -7
    y = float8.linear(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_array_equal(y, x @ kernel)


def test_a_token_gets_the_same_beside_any_others():
    """To the last bit: alone, among others, and beside one so large that a scale for all would leave it nothing."""
    kernel = jnp.round(3 * random(FAN_IN, 8, dtype=jnp.float32)).clip(-7, 7).at[0].set(7)
    x = jnp.round(3 * random(2, 6, FAN_IN, seed=1)).clip(-7, 7).at[..., 0].set(7)  # so that sums are exact in any order
    multiply = jax.jit(float8.linear)
    among = np.asarray(multiply(x, kernel), np.float32)
    np.testing.assert_array_equal(multiply(x[:1, 2:3], kernel), among[:1, 2:3])
    beside_large = np.asarray(multiply(x.at[1].multiply(2.0**30), kernel), np.float32)
    np.testing.assert_array_equal(beside_large[0], among[0])
    assert among.any(axis=-1).all()


def test_so_does_its_gradient():
    x, kernel, dy = given()
    dx = jax.jit(with_gradients, static_argnums=0)(float8.linear, x, kernel, dy)[1]
    beside_large = jax.jit(with_gradients, static_argnums=0)(float8.linear, x, kernel, dy.at[1].multiply(2.0**30))[1]
    np.testing.assert_array_equal(np.asarray(beside_large[0], np.float32), np.asarray(dx[0], np.float32))


@pytest.mark.parametrize("tiny", [0.0, 1e-39, 1e-30])
def test_nothing_is_divided_by_zero(tiny):
    x, kernel, dy = (jnp.full_like(array, tiny) for array in given())
    for array in jax.jit(with_gradients, static_argnums=0)(float8.linear, x, kernel, dy):
        np.testing.assert_array_equal(np.asarray(array, np.float32), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    x, kernel, _ = given()
    y = np.asarray(jax.jit(float8.linear)(x.at[0, 3, 5].set(bad), kernel), np.float32)
    finite = np.isfinite(y).all(axis=-1)
    assert not finite[0, 3] and finite.sum() == finite.size - 1


def test_a_kernel_may_have_been_rounded_before():
    x, kernel, dy = given()
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    for got, wanted in zip(
        with_gradients(float8.linear, x, rounded, dy), with_gradients(float8.linear, x, kernel, dy), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


def maps(*names):
    rngs = nnx.Rngs(0)
    return {name: Linear(FAN_IN, FAN_OUT, ("width", None), bias=True, std=0.1, rngs=rngs) for name in names}


def test_linear_maps_multiply_in_it_where_asked():
    x, (one, other) = given()[0], maps("one", "other").values()
    plain = [np.asarray(y, np.float32) for y in fused_linear(x, one, other)]
    with float8.use(True):
        both, apart = fused_linear(x, one, other), [one(x), one.product(x)]
    for y in (*both, *apart):
        np.testing.assert_array_equal(y, float8.linear(x, (other if y is both[1] else one).kernel[...]))
    assert LEAST < off(both[0], plain[0]) < MOST
    assert not float8.in_use()
    np.testing.assert_array_equal(np.asarray(one(x), np.float32), plain[0])


def products(text):
    """The shapes of what is multiplied in a compiled program."""
    return re.findall(r"= (\w+\[[\d,]*\])\S* dot\(", text)


def test_adapters_beside_it_are_as_they_were():
    """They multiply in the type of `x`; of a kernel that isn't trained no gradient is made."""
    x, one = given()[0], maps("one")["one"]
    a, b = (random(*shape, seed=3, dtype=jnp.float32) for shape in ((FAN_IN, 4), (4, FAN_OUT)))
    one.lora = LowRank(nnx.Param(a), nnx.Param(b), 0.5)
    graph, params = nnx.split(one)

    def loss(params):
        with float8.use(True):
            return nnx.merge(graph, params)(x).astype(jnp.float32).sum()

    def of_adapters(adapters, params):
        return loss(nnx.merge_state(params, adapters))

    adapters = nnx.State({"lora": params["lora"]})
    all_of_them = jax.grad(loss)(params)["lora"]
    alone = jax.jit(jax.grad(of_adapters))
    for name in ("a", "b"):
        np.testing.assert_array_equal(alone(adapters, params)["lora"][name][...], all_of_them[name][...])
    of_kernel = {f"f32[{FAN_IN},{FAN_OUT}]", f"f32[{FAN_OUT},{FAN_IN}]"}
    assert of_kernel & set(products(jax.jit(jax.grad(loss)).lower(params).compile().as_text()))
    assert not of_kernel & set(products(alone.lower(adapters, params).compile().as_text()))
    with float8.use(True):
        added = np.asarray(one(x) - maps("one")["one"](x), np.float32)
    np.testing.assert_allclose(added, np.asarray(one.lora(x), np.float32), rtol=0.05, atol=0.05 * np.abs(added).max())


def test_a_gpu_is_given_products_of_float8():
    lowered = (
        jax.jit(with_gradients, static_argnums=0).trace(float8.linear, *given()).lower(lowering_platforms=("cuda",))
    )
    found = re.findall(
        r"dot_general.*: \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\) -> tensor<\S*x(\w+)>", lowered.as_text()
    )
    assert sorted(found) == [("bf16", "bf16", "f32"), *[("f8E4M3FN", "f8E4M3FN", "bf16")] * 2]


@pytest.mark.parametrize(
    ("backend", "capability", "there"), [("cpu", 0, True), ("gpu", 8.6, False), ("gpu", 8.9, True)]
)
def test_which_devices_have_it(monkeypatch, backend, capability, there):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(kernels, "compute_capability", lambda: capability)
    assert float8.is_here() == there
