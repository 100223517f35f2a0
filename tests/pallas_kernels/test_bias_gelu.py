import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import assert_at_rounding_floor, assert_rounded, draw, sum_error, unit_roundoff

from andrea_jax import UserError
from pallas_kernels import bias_gelu, reference
from pallas_kernels.reference import wide

CASES = [  # N, F, dtype, bias's dtype
    (1, 8, "bfloat16", "float32"),
    (3, 1536, "float32", "bfloat16"),
    (37, 1, "float32", "float32"),
    (37, 1000, "bfloat16", "float32"),
    (257, 96, "float16", "float16"),
    (257, 1024, "bfloat16", "bfloat16"),
    (65537, 2, "bfloat16", "float32"),
]
# Of exp at -2 z, |z| < 44 where it is not 0: three roundings of z, so 6 |z| ulp of e, and e |z| < 1; and of the rest.
FLOAT32_ERROR = 16 * 2.0**-24


def both_passes(h, bias, dy, implementation):
    """gelu(h + bias) and the gradients of h and bias."""
    y, vjp = jax.vjp(jax.jit(lambda h, bias: bias_gelu(h, bias, implementation)), h, bias)
    return y, jax.jit(lambda vjp, dy: vjp(dy))(vjp, dy)


def check(h, bias, dy, y, gradients, implementation):
    """Against float64; XLA may use h + bias before it is rounded to h's dtype, and gelu' is at most 1.13."""
    dh, dbias = gradients
    exact_u = wide(h) + (0 if bias is None else wide(bias))
    u = wide(jnp.asarray(exact_u, h.dtype))
    rounding = np.abs(u - exact_u)
    assert_rounded(y, reference.gelu(u), 1.13 * rounding + FLOAT32_ERROR * np.abs(u))
    slope = reference.gelu_derivative(u)
    assert_rounded(dh, wide(dy) * slope, np.abs(wide(dy)) * FLOAT32_ERROR)
    if dbias is not None:
        assert dbias.dtype == bias.dtype
        float32_error = (sum_error(len(u)) + FLOAT32_ERROR) * np.abs(wide(dy)).sum(0) * 1.13
        if (
            implementation == "xla" and h.dtype == jnp.bfloat16
        ):  # it sums the rounded terms, whose errors are independent
            float32_error += 4 * unit_roundoff(h.dtype) * np.linalg.norm(wide(dy) * slope, axis=0)
        assert_rounded(dbias, (wide(dy) * slope).sum(0), float32_error)
    if dh.dtype != jnp.float32 and min(u.shape) > 30:
        assert_at_rounding_floor(dh, wide(dy) * slope)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(("N", "F", "dtype", "bias_dtype"), CASES)
def test_values_and_gradients_equal_float64(N, F, dtype, bias_dtype, implementation):
    h, dy = (jnp.asarray(a, dtype) for a in draw(0, 2, N, F) * np.float64([[[3]], [[1]]]))
    bias = jnp.asarray(draw(1, F), bias_dtype)
    y, gradients = both_passes(h, bias, dy, implementation)
    assert (y.dtype, gradients[0].dtype) == (h.dtype, h.dtype)
    check(h, bias, dy, y, gradients, implementation)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_bias_may_be_absent(implementation):
    h, dy = jnp.asarray(draw(0, 2, 5, 24), jnp.float32)
    y, (dh, dbias) = both_passes(h, None, dy, implementation)
    assert dbias is None
    check(h, None, dy, y, (dh, None), implementation)


def every_finite(dtype):
    """All finite float16 or bfloat16 numbers; of float32, those with the same leading 16 bits."""
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = np.asarray(bits).view(jnp.dtype("float16" if dtype == "float16" else "bfloat16"))
    return jnp.asarray(numbers[np.isfinite(numbers.astype(np.float32))].reshape(-1, 32), dtype)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_finite_number_has_a_finite_value_and_slope(dtype, implementation):
    """jax.nn.gelu's slope is NaN in float16 from 148 on."""
    u = every_finite(dtype)
    y, (dh, _) = both_passes(u, None, jnp.ones_like(u), implementation)
    tiny = float(jnp.finfo(jnp.float32).tiny)  # what lies below it may be flushed to 0
    assert_rounded(y, reference.gelu(u), FLOAT32_ERROR * np.minimum(np.abs(wide(u)), 20) + tiny)
    assert_rounded(dh, reference.gelu_derivative(u), FLOAT32_ERROR)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_far_out_it_is_relu_also_where_the_sum_with_the_bias_overflowed(implementation):
    u = jnp.asarray([[65504, -65504, np.inf, -np.inf]], jnp.float16)
    y, (dh, _) = both_passes(u, None, jnp.ones_like(u), implementation)
    np.testing.assert_array_equal(y, np.float16([[65504, 0, np.inf, 0]]))
    np.testing.assert_array_equal(dh, np.float16([[1, 0, 1, 0]]))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_nan_is_not_hidden(implementation):
    y, (dh, _) = both_passes(jnp.full((1, 4), jnp.nan), None, jnp.ones((1, 4)), implementation)
    assert np.all(np.isnan(y) & np.isnan(dh))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96), (3, 0)])
def test_nothing_gives_nothing(shape, implementation):
    dh, dbias = jax.grad(lambda *args: bias_gelu(*args, implementation).sum(), argnums=(0, 1))(
        jnp.zeros(shape), jnp.ones(shape[-1])
    )
    assert dh.shape == shape
    np.testing.assert_array_equal(dbias, np.zeros(shape[-1]))


def test_it_is_the_models_activation():
    u = jnp.linspace(-8, 8, 257, dtype=jnp.float32)
    # Both round z, at most 60 here, and what follows, a few times.
    np.testing.assert_allclose(bias_gelu(u, None), jax.nn.gelu(u, approximate=True), atol=64 * unit_roundoff(u.dtype))


@pytest.mark.parametrize(
    ("h", "bias", "message"),
    [
        (jnp.zeros((3, 4)), jnp.zeros(3), r"bias has shape \(3,\): expected \(4,\)"),
        (jnp.zeros((3, 4), int), None, r"h is int32\[3, 4\]"),
        (jnp.float32(0), None, r"h is float32\[\]"),
    ],
)
def test_wrong_arguments_are_named(h, bias, message):
    with pytest.raises(UserError, match=message):
        bias_gelu(h, bias)
