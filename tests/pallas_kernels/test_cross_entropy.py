import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import assert_at_rounding_floor, assert_rounded, draw

from andrea_jax import UserError
from pallas_kernels.cross_entropy import losses_and_gradient
from pallas_kernels.cross_entropy_kernel import HELD, TILE, split
from pallas_kernels.cross_entropy_reference import losses_and_gradient as exact_losses_and_gradient
from pallas_kernels.reference import wide

ULP = 2.0**-24
CASES = [  # rows, columns, vocabulary, dtype
    (1, 1, 1, "float32"),
    (3, 2, 1, "bfloat16"),
    (37, 65, 65, "float32"),
    (5, 127, 127, "bfloat16"),
    (5, 128, 127, "float16"),
    (5, 129, 129, "float32"),
    (3, 8449, 8449, "bfloat16"),
    (3, 8576, 8449, "bfloat16"),
    (3, 8576, 8449, "float32"),
    (2, HELD, HELD, "float32"),
    (2, HELD + 1, HELD + 1, "float32"),
    (2, 3 * TILE, 3 * TILE - 130, "float32"),
    (2, 3 * TILE + 384, 3 * TILE + 257, "bfloat16"),
]


def rows(R, V, dtype, vocab_size, scale=4.0):
    """Logits, labels at the borders of the kernel's tiles, weights of which one is 0."""
    labels = np.array([vocab_size - 1, 0, TILE, TILE - 1, 2 * TILE, vocab_size // 2])
    weights = np.array([0.5, 1.0, 0.0, -2.0, 3.0])
    logits = jnp.asarray(scale * draw(R + V, R, V), dtype)
    return logits, jnp.asarray(np.resize(labels % vocab_size, R)), jnp.asarray(np.resize(weights, R), jnp.float32)


def check(found, logits, labels, weights, vocab_size, z_loss):
    """float32: each exp errs by the rounding of x - max and its own, the sum by one rounding per level and lane."""
    exact = exact_losses_and_gradient(logits, labels, weights, vocab_size, z_loss)
    reach = np.abs(wide(logits)[:, :vocab_size]).max()
    sum_error = (16 + 2 * np.sqrt(vocab_size) + 2 * reach) * ULP
    for value, expected in zip(found[:2], exact[:2], strict=True):
        assert value.dtype == jnp.float32
        assert_rounded(value, expected, sum_error)
    size = np.abs(wide(weights))[:, None] * (1 + 2 * z_loss * np.abs(exact[0])[:, None])
    assert_rounded(found[2], exact[2], 2 * sum_error * size)
    assert np.all(wide(found[2])[:, vocab_size:] == 0)
    assert np.all(wide(found[2])[np.asarray(weights) == 0] == 0)
    return exact


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(("R", "V", "vocab_size", "dtype"), CASES)
def test_losses_and_gradient_equal_float64(R, V, vocab_size, dtype, z_loss, implementation):
    logits, labels, weights = rows(R, V, dtype, vocab_size)
    found = losses_and_gradient(logits, labels, weights, vocab_size, z_loss, implementation=implementation)
    assert found[2].dtype == logits.dtype
    exact = check(found, logits, labels, weights, vocab_size, z_loss)
    if dtype == "bfloat16":
        assert_at_rounding_floor(found[2], exact[2])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_gradient_of_float32_logits_may_be_bfloat16(implementation):
    logits, labels, weights = rows(3, 8576, jnp.float32, 8449)
    found = losses_and_gradient(logits, labels, weights, 8449, 0.0, jnp.bfloat16, implementation)
    assert found[2].dtype == jnp.bfloat16
    assert_at_rounding_floor(found[2], check(found, logits, labels, weights, 8449, 0.0)[2])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("V", [200, 3 * TILE])
def test_what_lies_outside_the_vocabulary_or_in_ignored_rows_does_not_count(V, implementation):
    logits, labels, weights = rows(5, V, jnp.float32, V - 7)
    spoilt = logits.at[:, V - 7 :].set(jnp.nan).at[2].set(jnp.inf)
    found = losses_and_gradient(spoilt, labels.at[2].set(-100), weights, V - 7, implementation=implementation)
    expected = losses_and_gradient(logits, labels, weights, V - 7, implementation=implementation)
    assert weights[2] == 0
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_array_equal(np.delete(found[1], 2), np.delete(expected[1], 2))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("V", [100, 3 * TILE])
def test_logits_of_any_size_give_finite_losses_and_gradients(V, implementation):
    largest = float(jnp.finfo(jnp.float32).max)
    logits = jnp.zeros((4, V)).at[0].set(largest).at[1].set(-largest).at[2, 0].set(largest).at[3, 1:].set(-largest)
    labels, weights = jnp.zeros(4, jnp.int32), jnp.ones(4)
    logsum, nll, dlogits = losses_and_gradient(logits, labels, weights, V, implementation=implementation)
    np.testing.assert_allclose(logsum, [largest, -largest, largest, 0])
    np.testing.assert_allclose(nll[2:], [0, 0])
    np.testing.assert_allclose(dlogits[:2, 1:], 1 / V, rtol=1e-6)
    np.testing.assert_array_equal(dlogits[2:], 0)


def test_the_kernel_gives_the_same_bits_twice_and_under_jit_vmap_and_scan():
    logits, labels, weights = rows(6, 300, jnp.float32, 290)

    def f(*args):
        return losses_and_gradient(*args, 290, 1e-3, implementation="pallas")

    expected = f(logits, labels, weights)
    parts = [x.reshape(2, 3, *x.shape[1:]) for x in (logits, labels, weights)]
    scanned = jax.lax.scan(lambda _, part: (None, f(*part)), None, tuple(parts))[1]
    for found in (f(logits, labels, weights), jax.jit(f)(logits, labels, weights), jax.vmap(f)(*parts), scanned):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.reshape(b.shape), b)


def test_no_rows_give_no_losses():
    found = losses_and_gradient(jnp.zeros((0, 8)), jnp.zeros(0, jnp.int32), jnp.zeros(0), 8, implementation="pallas")
    assert [x.shape for x in found] == [(0,), (0,), (0, 8)]


def test_a_derivative_of_the_kernel_is_refused():
    def total(logits):
        return losses_and_gradient(logits, jnp.zeros(1, jnp.int32), jnp.ones(1), 8, implementation="pallas")[1].sum()

    with pytest.raises(UserError, match=r"cross_entropy: .* use implementation='xla'"):
        jax.grad(total)(jnp.zeros((1, 8)))


@pytest.mark.parametrize("V", [1, 2, 3, 8448, 8449, HELD - 1, HELD])
def test_pieces_cover_a_row_and_are_powers_of_two(V):
    pieces = split(0, V)
    assert pieces[0][0] == 0
    assert all(size & (size - 1) == 0 for _, size in pieces)
    assert all(start + size == following for (start, size), (following, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) >= V > pieces[-1][0]
