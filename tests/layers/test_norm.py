import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.layers.norm import head_norm, norm

EPS = 1e-5
ULP = 2.0**-23
D = 24
GAIN, SHIFT = np.linspace(-1, 2, D), np.linspace(0, 1, D)


KINDS = ["layer", "rms"]


def config(kind):
    return ModelConfig(d_model=D, n_head=1, norm=kind, norm_eps=EPS)


def normed(p, x, kind="layer"):
    return norm(p, jnp.asarray(x), config(kind))[1]


def reference(x, gain=1.0, shift=0.0, kind="layer"):
    x = np.asarray(x, np.float64)
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain + shift


def rows(scale):
    """Rows whose mean is three times their spread, with both at `scale`."""
    drawn = np.random.default_rng(0).standard_normal((3, 5, D))
    return (scale * (drawn + 3)).astype(np.float32)


def params(gain, shift):
    return ({"gain": jnp.float32(GAIN)} if gain else {}) | ({"shift": jnp.float32(SHIFT)} if shift else {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("gain", "shift"), [(False, False), (True, False), (False, True), (True, True)])
def test_values_equal_float64(scale, gain, shift, kind):
    expected = reference(rows(scale), GAIN if gain else 1.0, SHIFT if shift else 0.0, kind)
    # The mean of 24 numbers of size 3 s is off by a few ulp of 3 s, so is each centred number of size s.
    atol = 16 * ULP * np.abs(expected).max()
    np.testing.assert_allclose(normed(params(gain, shift), rows(scale), kind), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_gradients_equal_float64(scale, kind):
    x, dy = rows(scale), np.random.default_rng(1).standard_normal((3, 5, D)).astype(np.float32)
    vjp = jax.vjp(lambda p, x: normed(p, x, kind), params(True, True), jnp.asarray(x))[1]
    dp, dx = vjp(jnp.asarray(dy))

    unit, x = reference(x, kind=kind), x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    rstd = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    dunit = dy * GAIN
    expected = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))
    if kind == "layer":
        expected = expected - rstd * dunit.mean(-1, keepdims=True)
    # As above, and again as much for the two means of the backward pass.
    np.testing.assert_allclose(dx, expected, rtol=0, atol=32 * ULP * np.abs(expected).max())
    for name, terms in (("gain", dy * unit), ("shift", dy.astype(np.float64))):
        atol = 16 * ULP * np.abs(terms).sum((0, 1)).max()
        np.testing.assert_allclose(dp[name], terms.sum((0, 1)), rtol=0, atol=atol)


@pytest.mark.parametrize("constant", [0.0, 0.5, -1000.0, 2.0**20])
def test_a_constant_row_gives_the_shift(constant):
    x = jnp.full((2, D), constant)  # every partial sum of these is exact
    np.testing.assert_array_equal(normed(params(True, True), x), np.float32([SHIFT, SHIFT]))
    for kind in KINDS:
        dx = jax.grad(lambda x, kind=kind: (normed(params(True, True), x, kind) * jnp.arange(D)).sum())(x)
        assert np.all(np.isfinite(dx))


@pytest.mark.parametrize("constant", [0.0, 0.5, -1000.0, 2.0**20])
def test_a_constant_row_keeps_its_sign_in_the_rms_norm(constant):
    x = jnp.full((2, D), constant)
    expected = constant / np.sqrt(constant**2 + EPS) * GAIN + SHIFT
    np.testing.assert_allclose(normed(params(True, True), x, "rms"), [expected] * 2, rtol=0, atol=8 * ULP)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e4])
def test_the_mean_square_is_one_unless_eps_decides(scale, kind):
    x = rows(scale)
    x64 = x.astype(np.float64)
    variance = x64.var(-1) if kind == "layer" else (x64**2).mean(-1)
    mean_square = np.square(np.asarray(normed({}, x, kind), np.float64)).mean(-1)
    np.testing.assert_allclose(mean_square, variance / (variance + EPS), rtol=32 * ULP)


def test_a_large_common_offset_does_not_cost_the_variance():
    """sum(x^2) / D - mean^2 in float32 would lose all digits of a variance of 1 beside a mean of 10^4."""
    x = (1e4 + np.random.default_rng(2).integers(-2, 3, (4, D))).astype(np.float32)
    # One rounding of the mean, at most 2^-11 here; the centred numbers are of size 2.
    np.testing.assert_allclose(normed({}, x), reference(x), rtol=0, atol=2**-10)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once_at_the_end(kind):
    x = jnp.asarray(rows(1.0), jnp.bfloat16)
    y = normed(params(True, True), x, kind)
    assert y.dtype == jnp.bfloat16
    expected = reference(x.astype(jnp.float32), GAIN, SHIFT, kind)
    bound = 2**-8 * np.abs(expected) + 16 * ULP * np.abs(expected).max()
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= bound)


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_the_stream_is_handed_through_and_its_gradient_added(kind):
    x, p = jnp.asarray(rows(1.0)), params(True, True)
    (stream, _), vjp = jax.vjp(lambda x: norm(p, x, config(kind)), x)
    np.testing.assert_array_equal(stream, x)
    dstream, dy = (np.random.default_rng(s).standard_normal(x.shape).astype(np.float32) for s in (5, 6))
    both, alone = vjp((dstream, dy))[0], vjp((jnp.zeros_like(x), dy))[0]
    np.testing.assert_allclose(both, alone + dstream, rtol=0, atol=4 * ULP * np.abs(both).max())


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_what_is_added_to_the_stream_is_normed_with_it(kind):
    x, delta = jnp.asarray(rows(1.0)), jnp.asarray(rows(0.5)[::-1])
    stream, y = norm(params(True, True), x, config(kind), delta_BTD=delta)
    np.testing.assert_array_equal(stream, x + delta)
    np.testing.assert_array_equal(y, stream if kind == "none" else normed(params(True, True), x + delta, kind))
    together = jax.grad(lambda x, d: norm({}, x, config(kind), delta_BTD=d)[1][..., 0].sum(), argnums=(0, 1))(x, delta)
    np.testing.assert_array_equal(together[0], together[1])


def test_without_a_norm_the_stream_is_what_is_read():
    x = jnp.asarray(rows(1.0))
    stream, y = norm({}, x, config("none"))
    assert stream is x
    assert y is x


def test_each_head_is_normed_by_itself_by_its_root_mean_square():
    x = rows(1.0).reshape(3, 5, 4, 6) * np.float32([1, 10, 100, 1000])[:, None]
    gain = np.linspace(-1, 2, 6).astype(np.float32)
    found = head_norm({"gain": jnp.asarray(gain)}, jnp.asarray(x), EPS)
    for head in range(4):
        expected = reference(x[:, :, head], gain, kind="rms")
        np.testing.assert_allclose(found[:, :, head], expected, rtol=0, atol=8 * ULP * np.abs(expected).max())
