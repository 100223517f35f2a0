import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.layers import norm

EPS = 1e-5
ULP = 2.0**-23
D = 24
GAIN, SHIFT = np.linspace(-1, 2, D), np.linspace(0, 1, D)


def layer_norm(p, x, eps):
    return norm.layer_norm(p, jnp.asarray(x), eps)[1]


def reference(x, gain=1.0, shift=0.0, eps=EPS):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gain + shift


def rows(scale):
    """Rows whose mean is three times their spread, with both at `scale`."""
    drawn = np.random.default_rng(0).standard_normal((3, 5, D))
    return (scale * (drawn + 3)).astype(np.float32)


def params(gain, shift):
    return ({"gain": jnp.float32(GAIN)} if gain else {}) | ({"shift": jnp.float32(SHIFT)} if shift else {})


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("gain", "shift"), [(False, False), (True, False), (False, True), (True, True)])
def test_values_equal_float64(scale, gain, shift):
    expected = reference(rows(scale), GAIN if gain else 1.0, SHIFT if shift else 0.0)
    # The mean of 24 numbers of size 3 s is off by a few ulp of 3 s, so is each centred number of size s.
    atol = 16 * ULP * np.abs(expected).max()
    np.testing.assert_allclose(layer_norm(params(gain, shift), rows(scale), EPS), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_gradients_equal_float64(scale):
    x, dy = rows(scale), np.random.default_rng(1).standard_normal((3, 5, D)).astype(np.float32)
    vjp = jax.vjp(lambda p, x: layer_norm(p, x, EPS), params(True, True), jnp.asarray(x))[1]
    dp, dx = vjp(jnp.asarray(dy))

    unit = reference(x)
    rstd = 1 / np.sqrt(x.astype(np.float64).var(-1, keepdims=True) + EPS)
    dunit = dy * GAIN
    expected = rstd * (dunit - dunit.mean(-1, keepdims=True) - unit * (dunit * unit).mean(-1, keepdims=True))
    # As above, and again as much for the two means of the backward pass.
    np.testing.assert_allclose(dx, expected, rtol=0, atol=32 * ULP * np.abs(expected).max())
    for name, terms in (("gain", dy * unit), ("shift", dy.astype(np.float64))):
        atol = 16 * ULP * np.abs(terms).sum((0, 1)).max()
        np.testing.assert_allclose(dp[name], terms.sum((0, 1)), rtol=0, atol=atol)


@pytest.mark.parametrize("constant", [0.0, 0.5, -1000.0, 2.0**20])
def test_a_constant_row_gives_the_shift(constant):
    x = jnp.full((2, D), constant)  # every partial sum of these is exact
    np.testing.assert_array_equal(layer_norm(params(True, True), x, EPS), np.float32([SHIFT, SHIFT]))
    dx = jax.grad(lambda x: (layer_norm(params(True, True), x, EPS) * jnp.arange(D)).sum())(x)
    assert np.all(np.isfinite(dx))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e4])
def test_the_mean_square_is_one_unless_eps_decides(scale):
    x = rows(scale)
    variance = x.astype(np.float64).var(-1)
    mean_square = np.square(np.asarray(layer_norm({}, x, EPS), np.float64)).mean(-1)
    np.testing.assert_allclose(mean_square, variance / (variance + EPS), rtol=32 * ULP)


def test_a_large_common_offset_does_not_cost_the_variance():
    """sum(x^2) / D - mean^2 in float32 would lose all digits of a variance of 1 beside a mean of 10^4."""
    x = (1e4 + np.random.default_rng(2).integers(-2, 3, (4, D))).astype(np.float32)
    # One rounding of the mean, at most 2^-11 here; the centred numbers are of size 2.
    np.testing.assert_allclose(layer_norm({}, x, EPS), reference(x), rtol=0, atol=2**-10)


def test_bfloat16_is_rounded_once_at_the_end():
    x = jnp.asarray(rows(1.0), jnp.bfloat16)
    y = layer_norm(params(True, True), x, EPS)
    assert y.dtype == jnp.bfloat16
    expected = reference(x.astype(jnp.float32), GAIN, SHIFT)
    bound = 2**-8 * np.abs(expected) + 16 * ULP * np.abs(expected).max()
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= bound)


def test_the_stream_is_handed_through_and_its_gradient_added():
    x, p = jnp.asarray(rows(1.0)), params(True, True)
    (stream, _), vjp = jax.vjp(lambda x: norm.layer_norm(p, x, EPS), x)
    np.testing.assert_array_equal(stream, x)
    dstream, dy = (np.random.default_rng(s).standard_normal(x.shape).astype(np.float32) for s in (5, 6))
    both, alone = vjp((dstream, dy))[0], vjp((jnp.zeros_like(x), dy))[0]
    np.testing.assert_allclose(both, alone + dstream, rtol=0, atol=4 * ULP * np.abs(both).max())
