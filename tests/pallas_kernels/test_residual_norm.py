import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import assert_at_rounding_floor, assert_rounded, draw, sum_error

from andrea_jax import UserError
from pallas_kernels import reference, residual_norm
from pallas_kernels.reference import wide

EPS = 1e-5
CASES = [  # N, D, dtype, gain's dtype, eps, kind
    (1, 8, "bfloat16", "float32", EPS, "layer"),
    (3, 1536, "float32", "bfloat16", EPS, "rms"),
    (37, 1, "float32", "float32", 1e-12, "layer"),
    (37, 1000, "bfloat16", "bfloat16", 1e-12, "layer"),
    (37, 1024, "float16", "float32", EPS, "layer"),
    (257, 96, "float32", "float32", 1e-12, "layer"),
    (257, 96, "float32", "float32", 1e-12, "rms"),
    (257, 384, "float16", "float16", EPS, "rms"),
    (257, 768, "bfloat16", "float32", EPS, "layer"),
    (257, 768, "bfloat16", "float32", EPS, "rms"),
    (65537, 2, "bfloat16", "float32", EPS, "layer"),
]


def inputs(N, D, dtype, gain_dtype):
    """x, delta, gain, shift, dstream, dy; some rows of x + delta are 0, constant, huge or tiny; some gains are 0."""
    x, delta, dstream, dy = draw(0, 4, N, D)
    gain, shift = draw(1, 2, D)
    gain[::3] = 0
    huge, tiny = (1e4, 1e-6) if dtype == "float16" else (1e15, 1e-15)
    if N > 30:
        for row, scale in ((4, 0), (5, huge), (6, tiny)):
            x[row], delta[row] = scale * x[row], scale * delta[row]
        x[7], delta[7] = 0.1, 0.0
    rows = [jnp.asarray(a, dtype) for a in (x, delta)], [jnp.asarray(a, dtype) for a in (dstream, dy)]
    return *rows[0], jnp.asarray(gain, gain_dtype), jnp.asarray(shift, gain_dtype), *rows[1]


def both_passes(x, delta, gain, shift, dstream, dy, eps, kind, implementation):
    """(stream, normed) and the gradients of x, delta, gain, shift; compiled apart, as a stored stream is rounded."""
    norm = jax.jit(lambda *args: residual_norm(*args, eps, kind, implementation))
    outputs, vjp = jax.vjp(norm, x, delta, gain, shift)
    return outputs, jax.jit(lambda vjp, cotangents: vjp(cotangents))(vjp, (dstream, dy))


def check(x, delta, gain, shift, dstream, dy, eps, kind, outputs, gradients):
    """Against float64 at the stream that was returned; XLA may norm the sum before it is rounded to that.

    A mean of D numbers is off by `e` of the largest, so the normalised rows by e A, A = rstd max |s|; dx contains
    them twice beside rstd |dy gain|. The sums over N rows add their own error.
    """
    (stream, normed), (dx, ddelta, dgain, dshift) = outputs, gradients
    D = x.shape[-1]
    _, exact = reference.residual_norm(stream, None, gain, shift, eps, kind)
    of_rounding = np.abs(exact - reference.residual_norm(x, delta, gain, shift, eps, kind)[1])
    exact_dx, exact_dgain, exact_dshift = reference.residual_norm_gradients(stream, dy, dstream, gain, eps, kind)
    s, wide_dy = wide(stream), wide(dy)
    largest_gain = 1.0 if gain is None else np.abs(wide(gain)).max()
    variance = s.var(-1, keepdims=True) if kind == "layer" else (s**2).mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(variance + eps)
    size = rstd * np.abs(s).max(-1, keepdims=True)
    e = sum_error(D)
    largest_shift = 0.0 if shift is None else np.abs(wide(shift)).max()
    assert_rounded(normed, exact, of_rounding + e * (size * largest_gain + largest_shift))
    dunit = rstd * np.abs(wide_dy).max(-1, keepdims=True) * largest_gain
    assert_rounded(dx, exact_dx, e * (dunit * (1 + size) ** 2 + (0 if dstream is None else np.abs(wide(dstream)))))
    if ddelta is not None:
        np.testing.assert_array_equal(ddelta, dx)
    rows = sum_error(len(s))
    if dgain is not None:
        assert dgain.dtype == gain.dtype
        assert_rounded(dgain, exact_dgain, (rows + e) * (np.abs(wide_dy) * size).sum(0))
    if dshift is not None:
        assert dshift.dtype == shift.dtype
        assert_rounded(dshift, exact_dshift, rows * np.abs(wide_dy).sum(0))
    if dx.dtype != jnp.float32 and min(s.shape) > 90:
        assert_at_rounding_floor(dx, exact_dx)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(("N", "D", "dtype", "gain_dtype", "eps", "kind"), CASES)
def test_values_and_gradients_equal_float64(N, D, dtype, gain_dtype, eps, kind, implementation):
    args = inputs(N, D, dtype, gain_dtype)
    outputs, gradients = both_passes(*args, eps, kind, implementation)
    x, delta = args[:2]
    assert {a.dtype for a in (*outputs, *gradients[:2])} == {x.dtype}
    exact_stream = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(outputs[0], exact_stream)
    check(*args, eps, kind, outputs, gradients)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("absent", [{"delta"}, {"shift"}, {"delta", "gain"}, {"delta", "gain", "shift"}])
def test_arguments_may_be_absent(absent, implementation):
    names = ("x", "delta", "gain", "shift", "dstream", "dy")
    given = dict(zip(names, inputs(5, 24, "float32", "float32"), strict=True))
    args = [None if name in absent else given[name] for name in names]
    outputs, gradients = both_passes(*args, EPS, "layer", implementation)
    assert [gradient is None for gradient in gradients] == [name in absent for name in names[:4]]
    check(*args, EPS, "layer", outputs, gradients)


WEIGHTS = draw(3, 24, 5)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(
    ("loss", "dy", "dstream"),
    [
        (lambda stream, normed: normed.sum(), np.ones((5, 24)), None),
        (lambda stream, normed: (normed.T * WEIGHTS).sum(), WEIGHTS.T, None),
        (lambda stream, normed: stream.sum() + normed[2:].sum(), np.ones((5, 24)) * [[0], [0], [1], [1], [1]], 1.0),
        (lambda stream, normed: (stream.T * WEIGHTS).sum(), np.zeros((5, 24)), WEIGHTS.T),
    ],
)
def test_cotangents_may_be_absent_broadcast_or_transposed(loss, dy, dstream, implementation):
    x, _, gain, shift, _, _ = inputs(5, 24, "float32", "float32")
    dx = jax.jit(jax.grad(lambda x: loss(*residual_norm(x, None, gain, shift, EPS, "layer", implementation))))(x)
    exact, _, _ = reference.residual_norm_gradients(x, dy, dstream, gain, EPS, "layer")
    np.testing.assert_allclose(dx, exact, rtol=0, atol=64 * sum_error(24))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96), (3, 0)])
def test_nothing_gives_nothing(shape, implementation):
    x, gain = jnp.zeros(shape), jnp.ones(shape[-1])

    def total(x, gain):
        return sum(y.sum() for y in residual_norm(x, x, gain, gain, EPS, "layer", implementation))

    dx, dgain = jax.grad(total, argnums=(0, 1))(x, gain)
    assert dx.shape == shape
    np.testing.assert_array_equal(dgain, np.zeros(shape[-1]))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_worked_numbers_of_the_lesson(implementation):
    for x in ([3.0, 4.0], [30.0, 40.0]):
        _, normed = residual_norm(jnp.asarray(x), None, jnp.ones(2), None, 0.0, "rms", implementation)
        np.testing.assert_allclose(normed, [0.8485, 1.1314], atol=5e-5)
    x, branch = jnp.asarray([[3, 4], [0.5, -0.5]])
    stream, _ = residual_norm(x, branch, jnp.ones(2), None, 0.0, "rms", implementation)
    np.testing.assert_array_equal(stream, [3.5, 3.5])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_mean_square_is_one_unless_eps_decides(kind, implementation):
    x = jnp.asarray(draw(4, 5, 96) * np.float64([[0], [1e-4], [1e-2], [1], [1e15]]), jnp.float32)
    _, normed = residual_norm(x, None, jnp.ones(96), None, EPS, kind, implementation)
    size = wide(x).var(-1) if kind == "layer" else (wide(x) ** 2).mean(-1)
    np.testing.assert_allclose((wide(normed) ** 2).mean(-1), size / (size + EPS), rtol=8 * sum_error(96))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_large_common_offset_does_not_cost_the_variance(implementation):
    """sum(x^2) / D - mean^2 in float32 would lose all digits of a variance of 2 beside a mean of 10^4."""
    x = jnp.asarray(1e4 + np.random.default_rng(2).integers(-2, 3, (4, 24)), jnp.float32)
    dy = jnp.asarray(draw(3, 4, 24), jnp.float32)
    (_, normed), vjp = jax.vjp(lambda x: residual_norm(x, None, None, None, EPS, "layer", implementation), x)
    (dx,) = vjp((jnp.zeros_like(x), dy))
    _, exact = reference.residual_norm(x, None, None, None, EPS, "layer")
    exact_dx, _, _ = reference.residual_norm_gradients(x, dy, None, None, EPS, "layer")
    # The mean is rounded once, by at most 2^-11; dx contains it times two numbers of at most 3.
    np.testing.assert_allclose(normed, exact, rtol=0, atol=2**-10)
    np.testing.assert_allclose(dx, exact_dx, rtol=0, atol=2**-7)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_zero_gain_stops_the_gradient_of_the_branch_only(implementation):
    x, delta, gain, shift, dstream, dy = inputs(5, 24, "float32", "float32")
    _, (dx, _, dgain, _) = both_passes(x, delta, 0 * gain, shift, dstream, dy, EPS, "layer", implementation)
    np.testing.assert_array_equal(dx, dstream)
    assert np.all(dgain != 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": jnp.zeros((3, 4), jnp.bfloat16)}, r"delta is bfloat16\[3, 4\]: expected float32\[3, 4\]"),
        ({"delta": jnp.zeros(4)}, r"delta is float32\[4\]"),
        ({"gain": jnp.zeros(3)}, r"gain has shape \(3,\): expected \(4,\)"),
        ({"shift": jnp.zeros((1, 4))}, "shift has shape"),
        ({"eps": -1.0}, "eps = -1.0"),
        ({"eps": float("nan")}, "eps = nan"),
        ({"kind": "batch"}, "kind = 'batch': expected one of layer, rms"),
        ({"x": jnp.zeros((3, 4), int)}, r"x is int32\[3, 4\]"),
        ({"x": jnp.float32(1)}, r"x is float32\[\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    args = dict(x=jnp.zeros((3, 4)), delta=None, gain=None, shift=None, eps=EPS, kind="layer") | change
    with pytest.raises(UserError, match=message):
        residual_norm(**args)
