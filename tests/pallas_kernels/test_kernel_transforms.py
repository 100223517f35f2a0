"""Both operations under JAX's transformations, as kernels (interpreted) and in their XLA form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import draw, sum_error

from andrea_jax import UserError
from pallas_kernels import bias_gelu, residual_norm

N, D = 3, 24
ATOL = 64 * sum_error(D)  # values of a few units, by two orders of summation


def norm_then_gelu(x, gain, implementation):
    """A value that needs every output: the stream and its norm, through the activation."""
    stream, normed = residual_norm(x, x, gain, gain, 1e-5, "layer", implementation)
    return stream + bias_gelu(normed, gain, implementation)


def value_and_gradients(f):
    return jax.jit(jax.value_and_grad(lambda x, gain: jnp.square(f(x, gain)).sum(), argnums=(0, 1)))


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=ATOL, atol=ATOL), actual, expected)


def expected_f(x, gain):
    return norm_then_gelu(x, gain, "xla")


@pytest.fixture(params=["xla", "pallas"])
def f(request):
    return lambda x, gain: norm_then_gelu(x, gain, request.param)


X, GAIN = jnp.asarray(draw(0, 3, N, D), jnp.float32), jnp.asarray(draw(1, 3, D), jnp.float32)


def test_both_forms_agree_and_two_runs_are_bit_equal():
    xla, pallas = (value_and_gradients(lambda x, gain, i=i: norm_then_gelu(x, gain, i)) for i in ("xla", "pallas"))
    assert_same(pallas(X, GAIN[0]), xla(X, GAIN[0]))
    jax.tree.map(np.testing.assert_array_equal, pallas(X, GAIN[0]), pallas(X, GAIN[0]))


def test_without_jit(f):
    assert_same(f(X[0], GAIN[0]), jax.jit(f)(X[0], GAIN[0]))


def slices_along(a, axis):
    return [a] * 3 if axis is None else list(jnp.moveaxis(a, axis, 0))


@pytest.mark.parametrize(("axis_x", "axis_gain"), [(0, 0), (1, None), (None, 0)])
def test_vmap(f, axis_x, axis_gain):
    batched = value_and_gradients(jax.vmap(f, (axis_x, axis_gain), out_axes=1))
    x, gain = (X if axis_x is not None else X[0]), (GAIN if axis_gain is not None else GAIN[0])

    def loop(x, gain):
        slices = zip(slices_along(x, axis_x), slices_along(gain, axis_gain), strict=True)
        return jnp.stack([expected_f(x, gain) for x, gain in slices])

    looped = value_and_gradients(loop)
    assert_same(batched(x, gain), looped(x, gain))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_vmap_of_shared_rows_counts_the_gradient_of_the_stream_once(implementation):
    """JAX alone would count it once for each of the mapped gains."""
    both = jax.vmap(lambda x, gain: residual_norm(x, None, gain, None, 1e-5, "layer", implementation), (None, 0))
    dx = jax.jit(jax.grad(lambda x: both(x, 0 * GAIN)[0].sum()))(X[0])
    np.testing.assert_array_equal(dx, np.full((N, D), 3))


def test_scan_and_checkpoint(f):
    def scanned(layer):
        return lambda x, gain: jax.lax.scan(lambda x, gain: (layer(x, gain), None), x, gain)[0]

    expected = value_and_gradients(lambda x, gain: functools.reduce(expected_f, gain, x))(X[0], GAIN)
    for layers in (scanned(f), scanned(jax.checkpoint(f))):
        actual = value_and_gradients(layers)(X[0], GAIN)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL * np.abs(b).max()), actual, expected
        )


def test_forward_mode_is_refused(f):
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(f, (X[0], GAIN[0]), (X[0], GAIN[0]))


def test_second_derivatives_come_from_the_xla_form_only():
    def twice(implementation):
        gradient = jax.grad(lambda x: jnp.square(norm_then_gelu(x, GAIN[0], implementation)).sum())
        return jax.jit(gradient), jax.jit(jax.grad(lambda x: (gradient(x) * X[1]).sum()))

    first, second = twice("xla")
    step = 1e-2
    difference = ((first(X[0] + step * X[2]) - first(X[0] - step * X[2])) / (2 * step) * X[1]).sum()
    # The quotient is off by the third derivative times step^2: a few of 10^-4 of the second.
    np.testing.assert_allclose((second(X[0]) * X[2]).sum(), difference, rtol=2e-2)
    with pytest.raises(UserError, match=r"first derivatives only; use implementation='xla'"):
        twice("pallas")[1](X[0])
