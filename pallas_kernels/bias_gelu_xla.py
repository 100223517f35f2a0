"""bias_gelu in plain JAX: the sigmoid form, finite wherever the exact value is. Any rank, so it keeps any sharding."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

SLOPE = math.sqrt(2 / math.pi)
CUBIC = 0.044715
FAR = 16.0  # beyond it gelu is 0 or u, and its derivative 0 or 1, to the last bit of float32


def gelu(u: jax.Array) -> jax.Array:
    """u sigmoid(2 z) with z = sqrt(2/pi) (u + 0.044715 u^3), which is u/2 (1 + tanh(z)); u in float32."""
    return jnp.maximum(u, -FAR) * sigmoid_parts(u)[0]


def gelu_derivative(u: jax.Array) -> jax.Array:
    """s + 2 u s (1 - s) z' with s = sigmoid(2 z); u is clamped, or 0 * inf would appear at 3e38."""
    s, slope_s = sigmoid_parts(u)
    u = jnp.clip(u, -FAR, FAR)
    return s + 2 * u * slope_s * SLOPE * (1 + 3 * CUBIC * u * u)


def sigmoid_parts(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """s = sigmoid(2 z) and s (1 - s), from e = exp(-2 |z|) in [0, 1]: no overflow, no cancellation in 1 - s."""
    u = jnp.clip(u, -FAR, FAR)
    z = SLOPE * u * (1 + CUBIC * u * u)
    e = jnp.exp(-2 * jnp.abs(z))
    larger = 1 / (1 + e)
    smaller = e * larger
    return jnp.where(u >= 0, larger, smaller), larger * smaller


def pre_activation(h: jax.Array, bias: jax.Array | None) -> jax.Array:
    """h + bias, rounded to h's dtype: what the product before stores for the backward pass."""
    return h if bias is None else (widen(h) + bias).astype(h.dtype)


def widen(a: jax.Array) -> jax.Array:
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def forward(h: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
    """(u, gelu(u)) for the pre-activation u = h + bias."""
    u = pre_activation(h, bias)
    return u, gelu(widen(u)).astype(h.dtype)


def backward(u: Any, dy: Any, bias: Any) -> tuple[jax.Array, jax.Array | None]:
    """(dh, dbias): dh = dy gelu'(u), dbias its sum over all rows. One kernel on a GPU, but three for float16.

    In bfloat16 the sum is of the rounded dh, widened by its bits: else XLA stores dh in float32 too, 7U instead of 3U.
    """
    terms = widen(dy) * gelu_derivative(widen(u))
    dh = terms.astype(u.dtype)
    if u.dtype == jnp.bfloat16:
        bits = jax.lax.bitcast_convert_type(dh, jnp.uint16).astype(jnp.uint32) << 16
        terms = jax.lax.bitcast_convert_type(bits, jnp.float32)
    dbias = None if bias is None else jnp.sum(terms, tuple(range(dh.ndim - 1))).astype(bias.dtype)
    return dh, dbias
