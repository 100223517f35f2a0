import math

import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.inspect import ulp
from andrea_jax.inspect.ulp import compare_arrays, float32_ulps, ordinals


def steps_up(x, n):
    """x after n steps to the next larger number of its type."""
    for _ in range(n):
        x = np.nextafter(x, np.float32(np.inf))
    return x


@pytest.mark.parametrize("start", [0.0, 1.0, 1.9999998, -3e-39, -1e30, -7e-45])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_neighbours_are_one_apart_also_across_zero_and_powers_of_two(start, n):
    a = np.full(5, 1.5, np.float32)
    b = a.copy()
    a[3], b[3] = start, steps_up(np.float32(start), n)
    found = compare_arrays("x", a, b)
    assert (found.ulp, found.different, found.elements, found.where) == (n, 1, 5, (3,))


def test_equal_bits_are_no_difference_even_for_nan_and_the_sign_of_zero_is_one():
    x = np.array([np.nan, -0.0, np.inf], np.float32)
    assert compare_arrays("x", x, x.copy()) is None
    found = compare_arrays("x", x, np.abs(x))
    assert (found.different, found.ulp, found.where) == (1, 0, (1,))


def test_a_number_and_nan_are_infinitely_far_apart():
    found = compare_arrays("x", np.array([1.0, 2.0], np.float32), np.array([1.0, np.nan], np.float32))
    assert found.relative == math.inf
    assert found.where == (1,)


def test_relative_is_of_the_largest_value_and_where_is_that_of_the_largest_ulp(monkeypatch):
    monkeypatch.setattr(ulp, "CHUNK", 4)
    a = np.linspace(-8, 8, 35, dtype=np.float32).reshape(5, 7)
    b = a.copy()
    b[1, 2] += 0.5
    b[2, 3] += 1e-6  # near zero: a small difference of many ulp
    found = compare_arrays("x", a, b)
    assert found.different == 2
    assert found.relative == pytest.approx(0.5 / 8)
    assert found.where == (2, 3)
    assert found.values == (a[2, 3], b[2, 3])


def test_bfloat16_and_integers_have_their_own_neighbours():
    a = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    found = compare_arrays("x", np.asarray(a), np.asarray(a + jnp.asarray([0, 2**-6], jnp.bfloat16)))
    assert (found.ulp, found.values) == (1, (2.0, 2.015625))
    assert compare_arrays("x", np.array([3, -2], np.int32), np.array([3, 5], np.int32)).ulp == 7
    assert list(ordinals(np.array(-4, np.int32))) == [-4]


def test_ulps_of_logged_numbers():
    one = float(np.float32(1.0))
    assert float32_ulps(one, float(np.nextafter(np.float32(1), np.float32(2)))) == 1
    assert float32_ulps(one, one + 2**-33) == pytest.approx(2**-10)
    assert float32_ulps(3.0, 3.0) == float32_ulps(math.nan, math.nan) == 0
    assert float32_ulps(3.0, math.nan) == math.inf
