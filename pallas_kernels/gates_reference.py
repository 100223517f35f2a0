"""What the gates compute, in float64 NumPy, from the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels import reference
from pallas_kernels.reference import Array, wide


def gate(gate: Any, up: Any, activation: str) -> Array:
    """act(gate) up."""
    return _value(wide(gate), activation) * wide(up)


def gate_gradients(gate: Any, up: Any, dy: Any, activation: str) -> tuple[Array, Array]:
    """(dgate, dup) = (dy up act'(gate), dy act(gate))."""
    gate, up, dy = wide(gate), wide(up), wide(dy)
    return dy * up * _derivative(gate, activation), dy * _value(gate, activation)


def _value(g: Array, activation: str) -> Array:
    return reference.gelu(g) if activation == "gelu" else g * _sigmoid(g)


def _derivative(g: Array, activation: str) -> Array:
    """Of silu: s + g s (1 - s), with 1 - s(g) = s(-g); g is clamped where s(-|g|) is 0, or 0 * inf would appear."""
    if activation == "gelu":
        return reference.gelu_derivative(g)
    near = np.clip(g, -700, 700)
    return _sigmoid(near) + near * _sigmoid(near) * _sigmoid(-near)


def _sigmoid(g: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(g, -700, 700)))
