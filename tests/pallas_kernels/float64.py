"""Bounds for comparing a result with float64: one rounding to its dtype, and the float32 arithmetic before it."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference import wide

ULP = 2.0**-24  # half a unit in the last place of float32


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def unit_roundoff(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def assert_rounded(actual, exact, float32_error):
    """|actual - exact| is at most one rounding to actual's dtype plus `float32_error`, which broadcasts to it."""
    exact = wide(exact)
    assert actual.shape == exact.shape
    rounding = unit_roundoff(actual.dtype) * np.abs(exact) + float(jnp.finfo(actual.dtype).smallest_subnormal)
    excess = np.abs(wide(actual) - exact) / (1.01 * rounding + float32_error)
    assert np.all(excess <= 1), f"{np.nanmax(excess):.2f} times the bound, {np.isnan(excess).sum()} not finite"


def assert_at_rounding_floor(actual, exact):
    """In the mean square, 16-bit results are within 1.1 times what rounding the exact result once costs."""
    exact = wide(exact)
    floor = np.linalg.norm(wide(exact.astype(actual.dtype)) - exact)
    assert np.linalg.norm(wide(actual) - exact) <= 1.1 * floor


def sum_error(terms):
    """Of a float32 sum of that many terms, relative to their absolute sum: roundings that add like a random walk."""
    return (8 + 2 * np.sqrt(terms)) * ULP
