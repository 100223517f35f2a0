"""The Triton kernels against float64: their bodies in Triton's interpreter, and called through jax-triton on a GPU."""

import importlib
import importlib.util
import inspect
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_bias_gelu
import test_residual_norm
import triton_interpreter
from float64 import assert_rounded, draw
from test_bias_gelu import FLOAT32_ERROR, every_finite
from test_residual_norm import EPS, inputs

from pallas_kernels import bias_gelu, dispatch, reference, residual_norm, triton_launch

MANY = 1000  # rows take seconds in the interpreter
NORM_CASES = [case for case in test_residual_norm.CASES if case[0] < MANY]
GELU_CASES = [case for case in test_bias_gelu.CASES if case[0] < MANY]
REFUSED = dispatch.support("bias_gelu", (8, 8), "float32", "jax_triton")
on_a_gpu = pytest.mark.skipif(bool(REFUSED), reason="; ".join(REFUSED))


@pytest.fixture(scope="module", params=["interpreted", pytest.param("jax_triton", marks=on_a_gpu)])
def backward(request):
    """The backward pass of an operation: backward(operation, *args, **options)."""
    if request.param == "jax_triton":
        yield lambda operation, *args, **options: jax.jit(partial(triton_module(operation).backward, **options))(*args)
        return
    if not importlib.util.find_spec("triton"):
        pytest.skip("needs triton, which the extra `dev` has on Linux x86-64")
    with triton_interpreter.interpreter() as pool:
        yield lambda operation, *args, **options: pool.submit(
            triton_interpreter.backward, operation, args, options
        ).result()


def triton_module(operation):
    return importlib.import_module(f"pallas_kernels.{operation}_triton")


def check_norm(backward, x, delta, gain, shift, dstream, dy, eps, kind):
    outputs = residual_norm(x, delta, gain, shift, eps, kind, "xla")
    dx, dgain, dshift = backward("residual_norm", outputs[0], dy, dstream, gain, shift, eps=eps, kind=kind)
    test_residual_norm.check(
        x, delta, gain, shift, dstream, dy, eps, kind, outputs, (dx, None if delta is None else dx, dgain, dshift)
    )
    return dx, dgain, dshift


@pytest.mark.parametrize(
    ("N", "D", "dtype", "gain_dtype", "eps", "kind"),
    [*NORM_CASES, (2, 8192, "float32", "float32", EPS, "layer")],
)
def test_the_norms_gradients_equal_float64(N, D, dtype, gain_dtype, eps, kind, backward):
    dx, _, _ = check_norm(backward, *inputs(N, D, dtype, gain_dtype), eps, kind)
    assert dx.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(
    "absent", [{"dstream"}, {"shift"}, {"gain"}, {"gain", "shift"}, {"delta", "gain", "shift", "dstream"}]
)
def test_the_norms_arguments_may_be_absent(absent, kind, backward):
    names = ("x", "delta", "gain", "shift", "dstream", "dy")
    given = dict(zip(names, inputs(5, 24, "bfloat16", "float32"), strict=True))
    _, *sums = check_norm(backward, *(None if name in absent else given[name] for name in names), EPS, kind)
    assert [total is None for total in sums] == [name in absent for name in ("gain", "shift")]


def test_a_large_common_offset_does_not_cost_the_variance(backward):
    stream = jnp.asarray(1e4 + np.random.default_rng(2).integers(-2, 3, (4, 24)), jnp.float32)
    dy = jnp.asarray(draw(3, 4, 24), jnp.float32)
    dx, _, _ = backward("residual_norm", stream, dy, None, None, None, eps=EPS, kind="layer")
    exact, _, _ = reference.residual_norm_gradients(stream, dy, None, None, EPS, "layer")
    np.testing.assert_allclose(dx, exact, rtol=0, atol=2**-7)  # the mean is rounded once, by at most 2^-11


def test_leading_axes_are_rows(backward):
    stream, dy, dstream = (jnp.asarray(draw(n, 2, 3, 24), jnp.float32) for n in range(3))
    gain = jnp.asarray(draw(3, 24), jnp.float32)
    deep = backward("residual_norm", stream, dy, dstream, gain, None, eps=EPS, kind="layer")
    flat = (a.reshape(6, 24) for a in (stream, dy, dstream))
    shallow = backward("residual_norm", *flat, gain, None, eps=EPS, kind="layer")
    np.testing.assert_array_equal(deep[0].reshape(6, 24), shallow[0])
    np.testing.assert_array_equal(deep[1], shallow[1])


def check_gelu(backward, h, bias, dy):
    u, y = triton_free_forward(h, bias)
    gradients = backward("bias_gelu", u, dy, bias)
    test_bias_gelu.check(h, bias, dy, y, gradients, "jax_triton")
    return gradients


def triton_free_forward(h, bias):
    """(pre-activation, its GELU), as the forward pass saves and gives them."""
    u = h if bias is None else (h.astype(jnp.float32) + bias).astype(h.dtype)
    return u, bias_gelu(u, None, "xla")


@pytest.mark.parametrize(("N", "F", "dtype", "bias_dtype"), [*GELU_CASES, (301, 600, "float16", "bfloat16")])
def test_gelus_gradients_equal_float64(N, F, dtype, bias_dtype, backward):
    h, dy = (jnp.asarray(a, dtype) for a in draw(0, 2, N, F) * np.float64([[[3]], [[1]]]))
    dh, _ = check_gelu(backward, h, jnp.asarray(draw(1, F), bias_dtype), dy)
    assert dh.dtype == h.dtype


def test_gelus_bias_may_be_absent(backward):
    h, dy = jnp.asarray(draw(0, 2, 5, 24), jnp.float32)
    assert check_gelu(backward, h, None, dy)[1] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_finite_number_has_a_finite_slope(dtype, backward):
    u = every_finite(dtype)
    dh, _ = backward("bias_gelu", u, jnp.ones_like(u), None)
    assert_rounded(dh, reference.gelu_derivative(u), FLOAT32_ERROR)


def test_far_out_it_is_relu_and_nan_is_not_hidden(backward):
    u = jnp.asarray([[65504, -65504, np.inf, -np.inf, np.nan]], jnp.float16)
    dh, _ = backward("bias_gelu", u, jnp.ones_like(u), None)
    np.testing.assert_array_equal(dh, np.float16([[1, 0, 1, 0, np.nan]]))


@pytest.mark.parametrize(
    ("triton_call", "expected"),
    [
        (lambda *args, out_shape, **options: (out_shape, options), {}),
        (
            lambda *args, out_type, backend_options, **options: (out_type, options | backend_options),
            {"ptx_version": 87, "enable_fp_fusion": True},
        ),
    ],
    ids=["0.3", "0.4"],
)
def test_both_jax_tritons_are_called_with_what_they_take(triton_call, expected, monkeypatch):
    seen = []

    def fake(*args, **options):
        outputs, rest = triton_call(*args, **options)
        seen.append((len(args), rest))
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    monkeypatch.setattr(fake, "__signature__", inspect.signature(triton_call), raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=fake))
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="8.6")])
    kernel, x = SimpleNamespace(__name__="double"), jnp.ones((3, 4))
    (y,) = triton_launch.call(kernel, (x, x), [x], (5, 1), 8, N=3, flag=True)
    assert y.shape == x.shape
    options = dict(kernel=kernel, grid=(5, 1), name="double", num_warps=8, num_stages=1, compute_capability=86)
    assert seen == [(2, options | {"N": 3, "flag": True} | expected)]


def norm_then_gelu(x, gain, bias, implementation):
    _, normed = residual_norm(x, None, gain, bias, EPS, "layer", implementation)
    return jnp.sin(bias_gelu(normed, bias, implementation)).sum()


def assert_close(found, expected):
    """In the L2 norm, of float32 arrays that were summed in another order."""
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)


@on_a_gpu
@pytest.mark.parametrize(("N", "D"), [(700, 768), (65537, 96)])
def test_through_the_public_functions_two_runs_give_the_same_bits(N, D):
    x, (gain, bias) = jnp.asarray(draw(0, N, D), jnp.float32), jnp.asarray(draw(1, 2, D), jnp.float32)
    triton, xla = (
        jax.jit(jax.grad(partial(norm_then_gelu, implementation=i), (0, 1, 2))) for i in ("jax_triton", "xla")
    )
    found = triton(x, gain, bias)
    jax.tree.map(np.testing.assert_array_equal, found, triton(x, gain, bias))
    jax.tree.map(assert_close, found, xla(x, gain, bias))


@on_a_gpu
def test_under_vmap():
    x, (gain, bias) = jnp.asarray(draw(0, 3, 70, 96), jnp.float32), jnp.asarray(draw(1, 2, 96), jnp.float32)
    gradients = jax.grad(partial(norm_then_gelu, implementation="jax_triton"), (0, 1, 2))
    mapped = jax.jit(jax.vmap(gradients, (0, None, None)))(x, gain, bias)
    for n in range(3):
        alone = jax.jit(gradients)(x[n], gain, bias)
        jax.tree.map(lambda many, one, n=n: assert_close(many[n], one), mapped, alone)
