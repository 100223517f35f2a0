"""The gates in plain JAX: one elementwise kernel in each direction. Any rank, so it keeps any sharding."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.bias_gelu_xla import gelu, gelu_derivative, widen


def silu(g: jax.Array) -> jax.Array:
    return g * jax.nn.sigmoid(g)


def silu_derivative(g: jax.Array) -> jax.Array:
    """s + g s (1 - s), with s (1 - s) = s(g) s(-g): no cancellation."""
    return jax.nn.sigmoid(g) * (1 + g * jax.nn.sigmoid(-g))


ACTIVATIONS = {"silu": (silu, silu_derivative), "gelu": (gelu, gelu_derivative)}


def forward(gate: Any, up: Any, *, activation: str) -> jax.Array:
    """act(gate) up."""
    return product(widen(gate), widen(up), activation).astype(gate.dtype)


def backward(gate: Any, up: Any, dy: Any, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """(dgate, dup) = (dy up act'(gate), dy act(gate))."""
    dgate, dup = gradients(widen(gate), widen(up), widen(dy), activation)
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


def product(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    return ACTIVATIONS[activation][0](gate) * up


def gradients(gate: jax.Array, up: jax.Array, dy: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    value, derivative = ACTIVATIONS[activation]
    return dy * up * derivative(gate), dy * value(gate)
