"""The operations as one writes them, for autodiff. Run in float64 they are the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

EPS = 1e-5


def wide(x: jax.Array) -> jax.Array:
    """float32, or float64 if it is that already."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x: jax.Array, gain: jax.Array, shift: jax.Array) -> jax.Array:
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + EPS) * gain + shift).astype(x.dtype)


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return (wide(x) * jax.lax.rsqrt(jnp.square(wide(x)).mean(-1, keepdims=True) + EPS) * gain).astype(x.dtype)


def stream_norm(x: jax.Array, gain: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, layer_norm(x, gain, shift)


def add_norm(x: jax.Array, delta: jax.Array, gain: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    return stream_norm(x + delta, gain, shift)


def gelu(h: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(wide(h) + bias, approximate=True).astype(h.dtype)


def gated(activation: Callable[..., Any], gate: jax.Array, up: jax.Array) -> jax.Array:
    return (activation(wide(gate)) * wide(up)).astype(gate.dtype)


def head(V: int, x_ND: jax.Array, head_DV: jax.Array, labels_N: jax.Array, weights_N: jax.Array) -> jax.Array:
    """sum w nll over the first V columns of x head, with the logits of all rows at once."""
    logits_NV = wide(x_ND @ head_DV.astype(x_ND.dtype))
    logits_NV = jnp.where(jnp.arange(logits_NV.shape[1]) < V, logits_NV, -jnp.inf)
    losses_N = -jnp.take_along_axis(jax.nn.log_softmax(logits_NV), labels_N[:, None], -1)[:, 0]
    return jnp.sum(weights_N * losses_N)
