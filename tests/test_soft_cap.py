"""The loss of capped logits against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.loss import cross_entropy

ULP = 2.0**-23
B, T, D = 2, 7, 8
Z_LOSS = 1e-2


def drawn(V, padded):
    rng = np.random.default_rng(V)
    x, head = rng.standard_normal((B, T, D)), rng.standard_normal((D, padded))
    weights = rng.uniform(0.25, 2, (B, T)) * (rng.random((B, T)) < 0.8)
    return jnp.float32(x), jnp.float32(head), jnp.int32(rng.integers(0, V, (B, T))), jnp.float32(weights)


def reference(x, head, labels, weights, V, cap):
    """Total, nll, and the gradients of the total in x, head and weights; (cap tanh(u / cap))' = 1 / cosh(u / cap)^2."""
    x, head, weights = (np.asarray(a, np.float64) for a in (x, head, weights))
    products = x @ head[:, :V]
    logits = cap * np.tanh(products / cap)
    logsum = np.log(np.exp(logits).sum(-1))
    hit = np.arange(V) == np.asarray(labels)[..., None]
    nll = logsum - (logits * hit).sum(-1)
    probability = np.exp(logits - logsum[..., None])
    dlogits = weights[..., None] * (probability * (1 + 2 * Z_LOSS * logsum[..., None]) - hit)
    dproducts = dlogits / np.cosh(products / cap) ** 2
    dhead = np.zeros(head.shape)
    dhead[:, :V] = np.einsum("btd,btv->dv", x, dproducts)
    loss = nll + Z_LOSS * logsum**2
    return (weights * loss).sum(), (weights * nll).sum(), dproducts @ head[:, :V].T, dhead, loss


@partial(jax.jit, static_argnames=("V", "chunk", "kernels", "cap"))
def found_by(x, head, labels, weights, V, chunk, kernels, cap):
    def f(x, head, weights):
        total, nll = cross_entropy(x, head, labels, weights, V, Z_LOSS, chunk, kernels, soft_cap=cap)
        return total, (total, nll)

    gradients, (total, nll) = jax.grad(f, argnums=(0, 1, 2), has_aux=True)(x, head, weights)
    return total, nll, *gradients


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
@pytest.mark.parametrize(("V", "padded", "chunk"), [(31, 31, 0), (31, 40, 4)])
@pytest.mark.parametrize("cap", [0.5, 3.0, 1e4])
def test_values_and_gradients_equal_float64(V, padded, chunk, cap, kernels):
    """Logits of size 3: far above the cap, about there, and far below."""
    arrays = drawn(V, padded)
    found, expected = found_by(*arrays, V, chunk, kernels, cap), reference(*arrays, V, cap)
    for name, a, b in zip(("total", "nll", "dx", "dhead", "dweights"), found, expected, strict=True):
        # As without a cap: sums of up to 31 terms. 1 - tanh^2 is off by a few ulp of 1.
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * ULP * np.abs(b).max(), err_msg=name)
    assert np.all(np.asarray(found[3][:, V:]) == 0)
    total, nll = jax.jit(lambda *a: cross_entropy(*a, V, Z_LOSS, chunk, soft_cap=cap))(*arrays)  # without a gradient
    np.testing.assert_allclose([total, nll], expected[:2], rtol=32 * ULP)


def test_a_bfloat16_gradient_errs_by_its_rounding():
    x, head, labels, weights = drawn(31, 31)
    x, head = x.astype(jnp.bfloat16), jnp.asarray(head, jnp.bfloat16).astype(jnp.float32)
    found = found_by(x, head, labels, weights, 31, 4, "xla", 2.0)
    expected = reference(x.astype(jnp.float32), head, labels, weights, 31, 2.0)
    np.testing.assert_allclose(found[:2], expected[:2], rtol=32 * ULP)
    for a, b in zip(found[2:4], expected[2:4], strict=True):
        # Rounded to 2^-9 at most: the gradient of a capped logit, the cap's slope, their product, and the result.
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        assert error < 4 * 2**-9
