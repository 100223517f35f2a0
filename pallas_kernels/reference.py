"""What the operations compute, in float64 NumPy, from the formulas: the oracle of every test."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def residual_norm(x: Any, delta: Any, gain: Any, shift: Any, eps: float, kind: str) -> tuple[Array, Array]:
    """(stream, normed) of residual_norm; an absent array is None."""
    stream = wide(x) + (0.0 if delta is None else wide(delta))
    unit, _ = _normalise(stream, eps, kind)
    return stream, unit * (1.0 if gain is None else wide(gain)) + (0.0 if shift is None else wide(shift))


def residual_norm_gradients(
    stream: Any, dy: Any, dstream: Any, gain: Any, eps: float, kind: str
) -> tuple[Array, Array, Array]:
    """(dx, dgain, dshift) at the stream: the transpose of the Jacobian applied to the cotangents."""
    dy = wide(dy)
    unit, rstd = _normalise(wide(stream), eps, kind)
    dunit = dy * (1.0 if gain is None else wide(gain))
    dcentred = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))
    dx = dcentred - dcentred.mean(-1, keepdims=True) if kind == "layer" else dcentred
    rows = tuple(range(dy.ndim - 1))
    return dx + (0.0 if dstream is None else wide(dstream)), (dy * unit).sum(rows), dy.sum(rows)


def _normalise(s: Array, eps: float, kind: str) -> tuple[Array, Array]:
    s = s - s.mean(-1, keepdims=True) if kind == "layer" else s
    rstd = 1 / np.sqrt((s**2).mean(-1, keepdims=True) + eps)
    return s * rstd, rstd


def gelu(u: Any) -> Array:
    """u/2 (1 + tanh(z)), z = sqrt(2/pi) (u + 0.044715 u^3), with 1 + tanh(z) = 2 / (1 + exp(-2 z))."""
    u = wide(u)
    return u / (1 + _decay(u))


def gelu_derivative(u: Any) -> Array:
    """1/2 (1 + tanh(z)) + u/2 (1 - tanh(z)^2) z', with 1 - tanh(z)^2 = 4 e / (1 + e)^2 for e = exp(-2 z)."""
    u = np.clip(wide(u), -100, 100)  # 0 or 1 beyond, in float64 too
    e = _decay(u)
    return 1 / (1 + e) + 2 * u * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2) * e / (1 + e) ** 2


def _decay(u: Array) -> Array:
    u = np.clip(u, -16, 16)
    return np.exp(-2 * np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))


def wide(a: Any) -> Array:
    return np.asarray(a).astype(np.float64)
