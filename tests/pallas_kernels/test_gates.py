import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import assert_rounded, draw

from andrea_jax import UserError
from pallas_kernels.gates import geglu, swiglu
from pallas_kernels.gates_reference import gate as exact_gate
from pallas_kernels.gates_reference import gate_gradients as exact_gradients
from pallas_kernels.reference import wide

OPERATIONS = {"silu": swiglu, "gelu": geglu}
FORMS = ["xla", "pallas"]
FLOAT32_ERROR = 16 * 2.0**-24  # of both derivatives, which are at most 1.13; of gelu relative to the gate
SMALLEST = 2.0**-126  # what lies below is flushed to 0


def value_error(gate, activation):
    """Of silu relative to its value: exp's argument is rounded, so |g| ulp, and a few more roundings."""
    if activation == "gelu":
        return FLOAT32_ERROR * np.abs(wide(gate))
    exact = exact_gate(gate, np.ones(gate.shape), activation)
    return (np.abs(wide(gate)) + 8) * 2.0**-24 * np.abs(exact) + 100 * SMALLEST


def check(activation, gate, up, dy, implementation):
    y, vjp = jax.vjp(jax.jit(lambda g, u: OPERATIONS[activation](g, u, implementation)), gate, up)
    dgate, dup = jax.jit(lambda vjp, dy: vjp(dy))(vjp, dy)
    assert {x.dtype for x in (y, dgate, dup)} == {gate.dtype}
    exact_dgate, exact_dup = exact_gradients(gate, up, dy, activation)
    error = value_error(gate, activation)
    assert_rounded(y, exact_gate(gate, up, activation), error * np.abs(wide(up)) + SMALLEST)
    assert_rounded(dgate, exact_dgate, FLOAT32_ERROR * np.abs(wide(dy) * wide(up)))
    assert_rounded(dup, exact_dup, error * np.abs(wide(dy)) + SMALLEST)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("activation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1,), (3, 8), (5, 7, 96), (37, 1000), (65537, 1)])
def test_values_and_gradients_equal_float64(shape, dtype, activation, implementation):
    gate, up, dy = (
        jnp.asarray(a, dtype) for a in draw(0, 3, *shape) * np.float64([5, 2, 1]).reshape(3, *[1] * len(shape))
    )
    check(activation, gate, up, dy, implementation)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("activation", OPERATIONS)
def test_gates_of_any_size_have_finite_values_and_gradients(activation, implementation):
    gate = jnp.float32([0, 1e-38, -1e-38, 20, -20, 90, -90, 200, -200, 3e38, -3e38])
    check(activation, gate, jnp.ones_like(gate), jnp.full_like(gate, 0.5), implementation)


@pytest.mark.parametrize("implementation", FORMS)
def test_the_lessons_swiglu(implementation):
    x, w_gate, w_up = np.float32([1, 2]), np.float32([[1, 0], [0, 0.5]]), np.float32([[0.5, 1], [1, 0]])
    gate, up = jnp.asarray(x @ w_gate), jnp.asarray(x @ w_up)
    np.testing.assert_allclose(gate, [1, 1])
    np.testing.assert_allclose(up, [2.5, 1])
    hidden = swiglu(gate, up, implementation)
    np.testing.assert_allclose(hidden, [1.8276, 0.7311], atol=5e-5)
    np.testing.assert_allclose(np.asarray(hidden) @ np.array([[1, -1], [0.5, 0.5]]), [2.1932, -1.4621], atol=5e-5)


def test_a_kernel_gives_the_same_bits_under_jit_vmap_and_scan():
    gate, up = jnp.float32(draw(1, 2, 4, 6, 10))
    f = jax.grad(lambda g, u: swiglu(g, u, "pallas").sum(), argnums=(0, 1))
    expected = f(gate, up)
    scanned = jax.lax.scan(lambda _, pair: (None, f(*pair)), None, (gate, up))[1]
    for found in (f(gate, up), jax.jit(f)(gate, up), jax.vmap(f, 1, 1)(gate, up), scanned):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_arrays_without_elements_pass():
    assert swiglu(jnp.zeros((0, 8)), jnp.zeros((0, 8)), "pallas").shape == (0, 8)


def test_gate_and_up_must_match():
    with pytest.raises(UserError, match=r"gate is float32\[2, 3\] and up float32\[3\]"):
        swiglu(jnp.zeros((2, 3)), jnp.zeros(3))
    with pytest.raises(UserError, match="up bfloat16"):
        geglu(jnp.zeros(3), jnp.zeros(3, jnp.bfloat16))


def test_a_second_derivative_of_the_kernel_is_refused_and_of_the_xla_form_right():
    def slope(form):
        return jax.grad(lambda g: swiglu(g, jnp.ones(1), form).sum())

    with pytest.raises(UserError, match=r"gates: .* use implementation='xla'"):
        jax.grad(lambda g: slope("pallas")(g).sum())(jnp.ones(1))
    second = jax.grad(lambda g: slope("xla")(g).sum())(jnp.ones(1))
    step = 1e-4
    first = [exact_gradients(np.array([1 + s]), np.ones(1), np.ones(1), "silu")[0] for s in (-step, step)]
    np.testing.assert_allclose(second, (first[1] - first[0]) / (2 * step), rtol=1e-5)
