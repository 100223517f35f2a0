import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.layers.mlp import ACTIVATIONS, mlp

ULP = 2.0**-23
D, F = 12, 48
RNG = np.random.default_rng(0)
PARAMS = {
    "w_1": RNG.standard_normal((D, F)).astype(np.float32),
    "b_1": RNG.standard_normal(F).astype(np.float32),
    "w_2": RNG.standard_normal((F, D)).astype(np.float32),
    "b_2": RNG.standard_normal(D).astype(np.float32),
}
X = RNG.standard_normal((2, 5, D)).astype(np.float32)


def gelu(u):
    return u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def reference(p, x, activation):
    p = {name: np.asarray(w, np.float64) for name, w in p.items()}
    h = np.asarray(x, np.float64) @ p["w_1"] + p.get("b_1", 0)
    return (gelu(h) if activation == "gelu" else np.maximum(h, 0)) @ p["w_2"] + p.get("b_2", 0)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("biases", [("b_1", "b_2"), (), ("b_1",), ("b_2",)])
def test_values_equal_float64(activation, biases):
    p = {name: w for name, w in PARAMS.items() if name.startswith("w") or name in biases}
    expected = reference(p, X, activation)
    # Two sums of up to 48 products, each off by about sqrt(48) ulp of its largest partial sum.
    atol = 16 * ULP * np.abs(expected).max()
    np.testing.assert_allclose(mlp(p, jnp.asarray(X), activation), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*PARAMS, "x"])
def test_gradients_equal_central_differences_in_float64(name):
    dy = RNG.standard_normal(X.shape).astype(np.float32)
    inputs = {**PARAMS, "x": X}
    grad = jax.grad(lambda w: (mlp({**inputs, name: w}, {**inputs, name: w}["x"], "gelu") * dy).sum())(inputs[name])
    direction = RNG.standard_normal(inputs[name].shape)

    def along(h):
        moved = {**inputs, name: inputs[name] + h * direction}
        return (reference({w: moved[w] for w in PARAMS}, moved["x"], "gelu") * dy).sum()

    slope = (along(1e-5) - along(-1e-5)) / 2e-5  # off by about h^2
    atol = 64 * ULP * np.linalg.norm(grad) * np.linalg.norm(direction)
    np.testing.assert_allclose((np.asarray(grad, np.float64) * direction).sum(), slope, rtol=1e-8, atol=atol)


def test_the_lesson_on_gelu():
    f = partial(ACTIVATIONS["gelu"], bias=None)
    assert f(jnp.zeros(1)) == 0
    large = jnp.float32([10, 100, 1e6, 3e38])
    np.testing.assert_array_equal(f(large), large)
    np.testing.assert_allclose(f(-large), 0, atol=1e-30)
    u = np.linspace(-6, 6, 1001)
    # 1 + tanh loses digits where tanh is near -1: an error of a few ulp of 1, times u / 2.
    np.testing.assert_allclose(f(jnp.float32(u)), gelu(u.astype(np.float32).astype(np.float64)), rtol=0, atol=12 * ULP)
    assert -0.171 < float(f(jnp.float32(u)).min()) < -0.169  # the dip, at u = -0.75


def test_relu_keeps_positive_numbers_and_drops_the_others():
    np.testing.assert_array_equal(ACTIVATIONS["relu"](jnp.float32([-2, -0.0, 0, 3]), None), [0, 0, 0, 3])


@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", 3e4), ("float16", 6e4), ("float32", 3e4)])
def test_activations_and_their_slopes_are_finite_at_large_inputs(dtype, large):
    u = jnp.asarray([-large, -50, 50, large], dtype)
    for f in (partial(activation, bias=None) for activation in ACTIVATIONS.values()):
        np.testing.assert_array_equal(np.asarray(f(u), np.float32), np.maximum(np.float32(u), 0))
        np.testing.assert_array_equal(np.asarray(jax.grad(lambda u, f=f: f(u).sum())(u), np.float32), [0, 0, 1, 1])


def test_bfloat16_keeps_its_dtype_and_errs_by_its_rounding():
    y = mlp(PARAMS, jnp.asarray(X, jnp.bfloat16), "gelu")
    assert y.dtype == jnp.bfloat16
    expected = reference(PARAMS, X, "gelu")
    # Rounded: input, w_1, product, bias, activation, w_2, product, bias; each by about 2^-9 in the root mean square.
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 8**0.5 * 2**-9


def test_each_position_is_computed_by_itself():
    together = mlp(PARAMS, jnp.asarray(X), "gelu")
    changed = mlp(PARAMS, jnp.asarray(X).at[:, 3].set(9.0), "gelu")
    np.testing.assert_array_equal(np.delete(together, 3, axis=1), np.delete(changed, 3, axis=1))
    assert np.all(np.asarray(together[:, 3] != changed[:, 3]))
