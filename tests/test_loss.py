import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.loss import cross_entropy, loss_fn
from andrea_jax.model import model_forward
from andrea_jax.parameters import abstract_params

ULP, BF16 = 2.0**-23, 2.0**-8  # rounding: half a unit in the last of 24 and 8 bits, relative to the power of two below
D = 8
with_and_without_kernel = pytest.mark.parametrize("kernels", ["xla", "pallas"])


def drawn(B=2, T=7, V=31, padded=None, scale=1.0):
    """x, head, labels and fractional weights with zeros among them."""
    rng = np.random.default_rng(B * T * V)
    x = scale * rng.standard_normal((B, T, D))
    head = rng.standard_normal((D, padded or V))
    labels = rng.integers(0, V, (B, T))
    labels[0, 0] = V - 1
    weights = rng.uniform(0.25, 2, (B, T)) * (rng.random((B, T)) < 0.8)
    return jnp.float32(x), jnp.float32(head), jnp.int32(labels), jnp.float32(weights)


def reference(x, head, labels, weights, V, z_loss=0.0):
    """Total, nll, and the gradients of the total in x, head and weights, in float64; written from the formulas."""
    x, head, weights = (np.asarray(a, np.float64) for a in (x, head, weights))
    logits = x @ head[:, :V]
    largest = logits.max(-1, keepdims=True)
    logsum = (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[..., 0]
    hit = np.arange(V) == np.asarray(labels)[..., None]
    nll = logsum - (logits * hit).sum(-1)
    loss = nll + z_loss * logsum**2
    probability = np.exp(logits - logsum[..., None])
    dlogits = weights[..., None] * (probability * (1 + 2 * z_loss * logsum[..., None]) - hit)
    dhead = np.zeros(head.shape)
    dhead[:, :V] = np.einsum("btd,btv->dv", x, dlogits)
    return (weights * loss).sum(), (weights * nll).sum(), dlogits @ head[:, :V].T, dhead, loss


@partial(jax.jit, static_argnames=("V", "z_loss", "chunk", "kernels", "outer"))
def value_and_gradients(x, head, labels, weights, V, z_loss=0.0, chunk=0, kernels="auto", outer=None):
    """Total, nll, and the gradients of outer(total), by default of the total, in x, head and weights."""

    def f(x, head, weights):
        total, nll = cross_entropy(x, head, labels, weights, V, z_loss, chunk, kernels)
        return outer(total) if outer else total, (total, nll)

    (_, (total, nll)), grads = jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True)(x, head, weights)
    return total, nll, *grads


def assert_close(found, expected, ulps):
    for name, a, b in zip(("total", "nll", "dx", "dhead", "dweights"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ulps * ULP * np.abs(b).max(), err_msg=name)


@with_and_without_kernel
@pytest.mark.parametrize(
    ("B", "T", "chunk"),
    [(2, 7, 0), (2, 7, 6), (2, 7, 14), (2, 7, 16), (1, 11, 12), (1, 12, 12), (1, 13, 12), (3, 5, 1), (1, 1, 0)],
)
def test_values_and_gradients_equal_float64_for_every_cut_into_chunks(B, T, chunk, kernels):
    arrays = drawn(B, T)
    # Logits of size 3 and sums of up to 31 terms, each off by a few ulp.
    assert_close(value_and_gradients(*arrays, 31, 1e-2, chunk, kernels), reference(*arrays, 31, 1e-2), 32)
    total, nll = jax.jit(lambda *a: cross_entropy(*a, 31, 1e-2, chunk))(*arrays)  # without a gradient: another path
    np.testing.assert_allclose([total, nll], reference(*arrays, 31, 1e-2)[:2], rtol=32 * ULP)


@with_and_without_kernel
@pytest.mark.parametrize(("V", "padded"), [(8449, 8449), (8449, 8576), (127, 128), (129, 256), (2, 2)])
@pytest.mark.parametrize("chunk", [0, 4])
def test_odd_and_padded_vocabularies_equal_float64(V, padded, chunk, kernels):
    arrays = drawn(V=V, padded=padded)
    found = value_and_gradients(*arrays, V, 0.0, chunk, kernels)
    assert_close(found, reference(*arrays, V), 64)
    assert np.all(np.asarray(found[3][:, V:]) == 0)


def test_it_equals_autodiff_of_the_plain_formula():
    x, head, labels, weights = arrays = drawn()

    def plain(x, head, weights):
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ head), labels[..., None], -1)[..., 0]
        return -(weights * picked).sum()

    expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(x, head, weights)
    found = value_and_gradients(*arrays, 31, 0.0, 4)
    assert_close(found, (expected[0], expected[0], *expected[1]), 64)


@with_and_without_kernel
def test_whatever_stands_in_padded_columns_changes_nothing(kernels):
    x, head, labels, weights = drawn(V=31, padded=40)
    one = value_and_gradients(x, head.at[:, 31:].set(1e4), labels, weights, 31, 1e-2, 4, kernels)
    two = value_and_gradients(x, head.at[:, 31:].set(-3.0), labels, weights, 31, 1e-2, 4, kernels)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@with_and_without_kernel
@pytest.mark.parametrize("label", [-1, -100, 31, 39, 40, 2**31 - 1, -(2**31)])
def test_ignored_rows_count_for_nothing_whatever_their_label(label, kernels):
    x, head, labels, weights = drawn(V=31, padded=40)
    absurd = jnp.where(weights == 0, label, labels)
    assert int((weights == 0).sum()) > 0
    found = value_and_gradients(x, head, absurd, weights, 31, 1e-2, 4, kernels)
    expected = value_and_gradients(x, head, labels, weights, 31, 1e-2, 4, kernels)
    for a, b in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.asarray(found[2])[np.asarray(weights) == 0] == 0)
    kept = np.asarray(weights) != 0
    without = reference(x[kept][None], head, labels[kept][None], weights[kept][None], 31, 1e-2)
    np.testing.assert_allclose(found[3], without[3], rtol=0, atol=32 * ULP * np.abs(without[3]).max())


@pytest.mark.parametrize(
    ("outer", "slope"),
    [
        (lambda t: 0.0 * t, lambda t: 0.0),
        (lambda t: -3.7 * t, lambda t: -3.7),
        (lambda t: jnp.log(t) ** 2, lambda t: 2 * math.log(t) / t),
    ],
    ids=["zero", "negative", "inside"],
)
def test_gradients_are_scaled_by_the_incoming_cotangent(outer, slope):
    arrays = drawn()
    total, nll, *expected = reference(*arrays, 31, 1e-2)
    found = value_and_gradients(*arrays, 31, 1e-2, 4, outer=outer)
    assert_close(found, (total, nll, *(slope(total) * g for g in expected)), 32)


def test_the_reported_nll_has_no_gradient():
    x, head, labels, weights = drawn()
    nll = lambda x, head, weights: cross_entropy(x, head, labels, weights, 31)[1]  # noqa: E731
    for g in jax.jit(jax.grad(nll, argnums=(0, 1, 2)))(x, head, weights):
        assert np.all(np.asarray(g) == 0)


@with_and_without_kernel
@pytest.mark.parametrize("padded", [31, 40])
def test_huge_logits_stay_finite_and_right(padded, kernels):
    arrays = drawn(padded=padded, scale=1e4)
    found = value_and_gradients(*arrays, 31, 1e-4, 4, kernels)
    assert all(np.all(np.isfinite(np.asarray(a))) for a in found)
    # Logits of size 10^4 are off by a few of their own ulp.
    np.testing.assert_allclose(found[:2], reference(*arrays, 31, 1e-4)[:2], rtol=32 * ULP)


@with_and_without_kernel
def test_bfloat16_rows_err_by_their_rounding(kernels):
    x, head, labels, weights = drawn()
    x = x.astype(jnp.bfloat16)
    total, nll, dx, dhead, dweights = value_and_gradients(x, head, labels, weights, 31, 0.0, 4, kernels)
    assert (dx.dtype, dhead.dtype, dweights.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    head = head.astype(jnp.bfloat16)  # the product is of bfloat16 numbers, summed in float32
    expected = reference(x, head, labels, weights, 31)
    np.testing.assert_allclose([total, nll], expected[:2], rtol=32 * ULP)
    np.testing.assert_allclose(dweights, expected[4], rtol=0, atol=32 * ULP * expected[4].max())
    x, head = np.asarray(x, np.float64), np.asarray(head, np.float64)
    logits = x @ head
    dlogits = np.exp(logits - logits.max(-1, keepdims=True))
    dlogits /= dlogits.sum(-1, keepdims=True)
    dlogits = np.abs((dlogits - (np.arange(31) == np.asarray(labels)[..., None])) * np.asarray(weights)[..., None])
    # Each logit's gradient is rounded, and dx once more.
    dx_error = np.abs(np.asarray(dx, np.float64) - expected[2])
    assert np.all(dx_error <= 1.01 * BF16 * (dlogits @ np.abs(head).T + np.abs(expected[2])))
    dhead_error = np.abs(np.asarray(dhead, np.float64) - expected[3])
    assert np.all(dhead_error <= 1.01 * BF16 * np.einsum("btd,btv->dv", np.abs(x), dlogits))


def test_logits_rounded_to_bfloat16_would_err_far_more_than_by_the_rounding_of_x():
    """Why logits are float32: with the largest about 10, each row pointing to its label and a rival."""
    V, width, R = 8449, 768, 64
    rng = np.random.default_rng(0)
    head = np.asarray(jnp.bfloat16(0.02 * rng.standard_normal((width, V))), np.float64)
    labels, rivals = rng.integers(0, V, (2, R))
    towards = head / np.square(head).sum(0)
    exact_x = 0.5 * rng.standard_normal((R, width)) + 9 * towards[:, labels].T + 10 * towards[:, rivals].T
    x = jnp.bfloat16(exact_x)

    def losses(logits):
        return np.log(np.exp(logits).sum(-1)) - logits[np.arange(R), labels]

    def noise(a, b):
        return np.sqrt(np.square(np.float64(a) - b).mean())

    logits = np.asarray(x, np.float64) @ head
    rounding_x = noise(losses(logits), losses(exact_x @ head))
    rounding_logits = noise(losses(np.asarray(jnp.bfloat16(logits), np.float64)), losses(logits))
    arrays = x[None], jnp.float32(head), jnp.int32(labels)[None], jnp.ones((1, R))
    found = value_and_gradients(*arrays, V)[4][0]  # the gradient in the weights is the loss of each row
    assert rounding_logits > 5 * rounding_x
    assert noise(found, losses(logits)) < rounding_x / 100


def test_a_cotangent_is_not_rounded_to_bfloat16():
    """1/3 in bfloat16 is off by 0.2 %: it would scale all of dx, and not dhead, by that much."""
    x, head, labels, weights = drawn(B=4, T=64)
    x = x.astype(jnp.bfloat16)
    one = np.asarray(value_and_gradients(x, head, labels, weights, 31)[2], np.float64)
    third = np.asarray(value_and_gradients(x, head, labels, weights, 31, outer=lambda t: t / 3)[2], np.float64)
    # The rounding of each of the 2,048 numbers is independent of the others; their sum keeps a common factor.
    assert abs((third * one).sum() / (one * one).sum() * 3 - 1) < 5 * BF16 / math.sqrt(one.size)


def float_sizes(jaxpr):
    """Numbers in each array of floats that is made anywhere inside."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
        for inner in jaxprs_in_params(eqn.params):
            yield from float_sizes(inner)


def test_no_more_than_a_chunk_of_logits_is_ever_held():
    B, T, V = 2, 32, 1001
    arrays = drawn(B, T, V)

    def largest(chunk):
        return max(float_sizes(jax.make_jaxpr(lambda *a: value_and_gradients(*a, V=V, chunk=chunk))(*arrays).jaxpr))

    assert largest(16) == 16 * V
    assert largest(2) == D * V  # the head itself
    assert largest(0) == B * T * V  # so few rows are one chunk; and the counting does see the logits


@pytest.mark.parametrize(("B", "T", "V", "rows"), [(2, 1024, 2**20, 4 * D), (2, 1024, 2**15, 512), (2, 1024, 31, 2048)])
def test_the_default_chunk_is_4_d_rows_or_64_mib(B, T, V, rows):
    x, head = jax.ShapeDtypeStruct((B, T, D), jnp.float32), jax.ShapeDtypeStruct((D, V), jnp.float32)
    labels, weights = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda *a: value_and_gradients(*a, V=V))(x, head, labels, weights)
    assert max(float_sizes(jaxpr.jaxpr)) == max(rows * V, D * V, B * T * D)


@with_and_without_kernel
def test_gradients_under_vmap_scan_and_checkpoint(kernels):
    x, head, labels, weights = drawn(B=3)
    expected = reference(x, head, labels, weights, 31)

    def row_loss(x, labels, weights):
        return cross_entropy(x[None], head, labels[None], weights[None], 31, 0.0, 2, kernels)[0]

    def vmapped(x):
        return jax.vmap(row_loss)(x, labels, weights).sum()

    def scanned(x):
        return jax.lax.scan(lambda sum, row: (sum + row_loss(*row), None), 0.0, (x, labels, weights))[0]

    def checkpointed(x):
        return jax.checkpoint(lambda x: cross_entropy(x, head, labels, weights, 31, 0.0, 4, kernels)[0])(x)

    results = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (vmapped, scanned, checkpointed)])(x)
    for total, dx in results:
        np.testing.assert_allclose(total, expected[0], rtol=32 * ULP)
        np.testing.assert_allclose(dx, expected[2], rtol=0, atol=32 * ULP * np.abs(expected[2]).max())


TINY = ModelConfig(vocab_size=31, context_length=8, d_model=8, n_layer=1, n_head=2, vocab_multiple=8)
PARAMS = jax.tree.map(  # random also where init puts zeros and ones
    lambda x: jnp.float32(np.random.default_rng(x.size).standard_normal(x.shape)), abstract_params(TINY)
)


def batch(weights):
    tokens = np.random.default_rng(0).integers(0, 31, (2, 9))
    return {"tokens_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:], "weights_BT": np.float32(weights)}


@jax.jit
def loss_of(params, batch, total_weight=None):
    return loss_fn(params, batch, TINY, z_loss=0.1, total_weight=total_weight)


def test_the_loss_is_the_weighted_mean_over_tokens():
    weights = np.random.default_rng(1).uniform(0, 2, (2, 8)).astype(np.float32)
    data = batch(weights)
    logits = np.asarray(model_forward(PARAMS, data["tokens_BT"], TINY), np.float64)
    logsum = np.log(np.exp(logits).sum(-1))
    nll = logsum - np.take_along_axis(logits, data["targets_BT"][..., None], -1)[..., 0]
    loss, metrics = loss_of(PARAMS, data)
    np.testing.assert_allclose(loss, np.average(nll + 0.1 * logsum**2, weights=weights), rtol=32 * ULP)
    np.testing.assert_allclose(metrics["nll"], (weights * nll).sum(), rtol=32 * ULP)
    np.testing.assert_allclose(metrics["weight"], weights.sum(), rtol=4 * ULP)
    part, _ = loss_of(PARAMS, data, 100.0)
    np.testing.assert_allclose(part * 100, loss * weights.sum(), rtol=4 * ULP)


def test_a_batch_without_weight_has_loss_zero_and_no_gradient():
    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(PARAMS, batch(np.zeros((2, 8))))
    assert (loss, metrics["nll"], metrics["weight"]) == (0, 0, 0)
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def test_equal_logits_cost_the_log_of_the_vocabulary():
    """Chance level: ln 31 here, ln 8449 = 9.04 for ANDREA-120M; padded columns do not count."""
    zero = {**PARAMS, "token_embedding": jnp.zeros_like(PARAMS["token_embedding"])}
    _, metrics = loss_of(zero, batch(np.ones((2, 8))))
    assert metrics["nll"] / metrics["weight"] == pytest.approx(math.log(31), rel=8 * ULP)
    assert math.log(8449) == pytest.approx(9.04, abs=0.005)


@pytest.mark.parametrize(("kernels", "runs"), [("auto", False), ("xla", False), ("pallas", True)])
def test_the_engine_says_whether_a_kernel_computes_loss_and_gradient(kernels, runs):
    def value(params):
        return loss_fn(params, batch(np.ones((2, 8))), TINY, EngineConfig(kernels=kernels))[0]

    assert ("name=cross_entropy" in str(jax.make_jaxpr(jax.grad(value))(PARAMS))) == runs
    assert "name=cross_entropy" not in str(jax.make_jaxpr(value)(PARAMS))  # it would write a gradient for nothing


def test_jax_triton_has_no_kernel_for_this_and_leaves_it_to_xla():
    arrays = drawn()
    found, expected = (value_and_gradients(*arrays, 31, kernels=kernels) for kernels in ("jax_triton", "xla"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
