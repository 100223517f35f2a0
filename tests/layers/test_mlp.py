import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model

from andrea_jax.config import ModelConfig
from andrea_jax.layers.mlp import mlp
from andrea_jax.parameters import init_params

ULP = 2.0**-23
D, F = 12, 48
ACTIVATIONS = ("gelu", "gelu_exact", "relu", "relu2", "silu")
RNG = np.random.default_rng(0)
PARAMS = {
    "w_1": RNG.standard_normal((D, F)).astype(np.float32),
    "b_1": RNG.standard_normal(F).astype(np.float32),
    "w_2": RNG.standard_normal((F, D)).astype(np.float32),
    "b_2": RNG.standard_normal(D).astype(np.float32),
}
GATE = {
    "w_gate": RNG.standard_normal((D, F)).astype(np.float32),
    "b_gate": RNG.standard_normal(F).astype(np.float32),
}
X = RNG.standard_normal((2, 5, D)).astype(np.float32)


def config(activation="gelu", gated=False):
    return ModelConfig(d_model=D, n_head=1, activation=activation, gated=gated)


def reference(p, x, activation):
    """In float64; gated where there is a gate."""
    p = {name: np.asarray(w, np.float64) for name, w in p.items()}
    x = np.asarray(x, np.float64)
    h = x @ p["w_1"] + p.get("b_1", 0)
    if "w_gate" in p:
        h = reference_model.activation(activation, x @ p["w_gate"] + p.get("b_gate", 0)) * h
    else:
        h = reference_model.activation(activation, h)
    return h @ p["w_2"] + p.get("b_2", 0)


def only(name, u):
    """The activation by itself: an MLP of one hidden unit, with weights of 1."""
    one = {"w_1": jnp.ones((1, 1), u.dtype), "w_2": jnp.ones((1, 1), u.dtype)}
    return mlp(one, u[..., None], config(name))[..., 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", [(), ("w_gate",), ("w_gate", "b_gate")])
@pytest.mark.parametrize("biases", [("b_1", "b_2"), (), ("b_1",), ("b_2",)])
def test_values_equal_float64(activation, gate, biases):
    p = {name: w for name, w in (PARAMS | GATE).items() if name in ("w_1", "w_2", *gate, *biases)}
    expected = reference(p, X, activation)
    # Two sums of up to 48 products, each off by about sqrt(48) ulp of its largest partial sum.
    atol = 16 * ULP * np.abs(expected).max()
    np.testing.assert_allclose(mlp(p, jnp.asarray(X), config(activation, bool(gate))), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*PARAMS, "x"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_central_differences_in_float64(name, activation):
    check_gradient(name, activation, PARAMS)


@pytest.mark.parametrize("name", [*PARAMS, *GATE, "x"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_a_gated_mlp_equal_central_differences_in_float64(name, activation):
    check_gradient(name, activation, PARAMS | GATE)


def check_gradient(name, activation, params):
    rng = np.random.default_rng(5)
    dy = rng.standard_normal(X.shape).astype(np.float32)
    inputs = {**params, "x": X}
    chosen = config(activation, "w_gate" in params)
    grad = jax.grad(lambda w: (mlp({**inputs, name: w}, {**inputs, name: w}["x"], chosen) * dy).sum())(inputs[name])
    direction = rng.standard_normal(inputs[name].shape)

    def along(h):
        moved = {**inputs, name: inputs[name] + h * direction}
        return (reference({w: moved[w] for w in params}, moved["x"], activation) * dy).sum()

    slope = (along(1e-5) - along(-1e-5)) / 2e-5  # off by about h^2
    atol = 64 * ULP * np.linalg.norm(grad) * np.linalg.norm(direction)
    np.testing.assert_allclose((np.asarray(grad, np.float64) * direction).sum(), slope, rtol=1e-8, atol=atol)


def test_the_lesson_on_gelu():
    assert only("gelu", jnp.zeros(1)) == 0
    large = jnp.float32([10, 100, 1e6, 3e38])
    np.testing.assert_array_equal(only("gelu", large), large)
    np.testing.assert_allclose(only("gelu", -large), 0, atol=1e-30)
    found = only("gelu", jnp.float32(np.linspace(-6, 6, 1001)))
    assert -0.171 < float(found.min()) < -0.169  # the dip, at u = -0.75


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_float64_from_end_to_end(name):
    u = np.linspace(-6, 6, 1001).astype(np.float32)
    expected = reference_model.activation(name, u.astype(np.float64))
    # 1 + tanh, 1 + erf and the sigmoid lose digits where they are near 0: a few ulp of 1, times u; relu2 reaches 36.
    np.testing.assert_allclose(only(name, jnp.asarray(u)), expected, rtol=2 * ULP, atol=12 * ULP)


def test_relu_keeps_positive_numbers_and_drops_the_others():
    np.testing.assert_array_equal(only("relu", jnp.float32([-2, -0.0, 0, 3])), [0, 0, 0, 3])
    np.testing.assert_array_equal(only("relu2", jnp.float32([-2, -0.0, 0, 3])), [0, 0, 0, 9])


@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", 3e4), ("float16", 6e4), ("float32", 3e4)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_are_finite_at_large_inputs(name, dtype, large):
    large = 200.0 if name == "relu2" else large  # 200^2 is within float16
    u = jnp.asarray([-large, -50, 50, large], dtype)
    values, slopes = (np.asarray(x, np.float32) for x in (only(name, u), jax.grad(lambda u: only(name, u).sum())(u)))
    if name == "relu2":
        np.testing.assert_array_equal(values, np.asarray(u * jnp.maximum(u, 0), np.float32))
        np.testing.assert_array_equal(slopes, 2 * np.maximum(np.float32(u), 0))
    else:  # silu(-50) is -50 e^-50
        np.testing.assert_allclose(values, np.maximum(np.float32(u), 0), rtol=0, atol=1e-19)
        np.testing.assert_allclose(slopes, [0, 0, 1, 1], rtol=0, atol=1e-19)


@pytest.mark.parametrize(
    ("activation", "gate", "roundings"), [("gelu", {}, 8), ("silu", GATE, 11), ("gelu", GATE, 11), ("relu2", GATE, 11)]
)
def test_bfloat16_keeps_its_dtype_and_errs_by_its_rounding(activation, gate, roundings):
    p = PARAMS | gate
    y = mlp(p, jnp.asarray(X, jnp.bfloat16), config(activation, bool(gate)))
    assert y.dtype == jnp.bfloat16
    expected = reference(p, X, activation)
    # Rounded: input, w_1, product, bias, activation, w_2, product, bias; each by about 2^-9 in the root mean square.
    # With a gate also its matrix, product and bias; relu2 doubles what came before it.
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < (2 if activation == "relu2" else 1) * roundings**0.5 * 2**-9


@pytest.mark.parametrize("gated", [False, True])
def test_each_position_is_computed_by_itself(gated):
    p = PARAMS | GATE if gated else PARAMS
    together = mlp(p, jnp.asarray(X), config("gelu", gated))
    changed = mlp(p, jnp.asarray(X).at[:, 3].set(9.0), config("gelu", gated))
    np.testing.assert_array_equal(np.delete(together, 3, axis=1), np.delete(changed, 3, axis=1))
    assert np.all(np.asarray(together[:, 3] != changed[:, 3]))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_mlp_under_jax_triton_is_xlas_for_which_there_is_no_such_kernel(activation):
    config = ModelConfig(31, 8, 16, 1, 2, gated=True, activation=activation)
    p = jax.tree.map(lambda x: x[0], init_params(jax.random.key(0), config)["blocks"]["mlp"])
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    np.testing.assert_array_equal(mlp(p, x, config, "jax_triton"), mlp(p, x, config, "xla"))
