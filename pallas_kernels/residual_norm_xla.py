"""residual_norm in plain JAX, written so that XLA moves few bytes. Any rank, so it keeps any sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bias_gelu_xla import widen


def forward(x: Any, delta: Any, gain: Any, shift: Any, *, eps: float, kind: str) -> tuple[jax.Array, jax.Array]:
    """(stream, normed). The variance takes two passes over a row that is in registers: one kernel on a GPU."""
    stream = x if delta is None else x + delta
    s = widen(stream)
    s = s - _mean(s) if kind == "layer" else s
    y = s * jax.lax.rsqrt(_mean(s * s) + eps)
    y = y if gain is None else y * gain
    y = y if shift is None else y + shift
    return _mapped_like(stream, gain, shift), y.astype(x.dtype)


def backward(
    stream: Any, dy: Any, dstream: Any, gain: Any, shift: Any, *, eps: float, kind: str
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(dx, dgain, dshift) for the cotangents dy of normed and dstream (or None) of the stream.

    With g = dy gain and n the normalised rows: dx = rstd (g - mean(g) - n mean(g n)) + dstream, without mean(g) in
    the rms kind; dgain = sum(dy n) and dshift = sum(dy) over all rows. On a GPU two kernels: all the means of a row in
    one reading, which is why the layer kind takes them around the row's first number t, where
    var = mean((s - t)^2) - mean(s - t)^2 loses at most D roundings; then dx and the sums in another.
    """
    s, dy = widen(stream), widen(dy)
    g = dy if gain is None else dy * gain
    if kind == "layer":
        s = s - widen(stream[..., :1])
        mean_s, mean_g = _mean(s), _mean(g)
        rstd = jax.lax.rsqrt(jnp.maximum(_mean(s * s) - mean_s * mean_s, 0.0) + eps)
        mean_gn = (_mean(g * s) - mean_g * mean_s) * rstd
        unit = (s - mean_s) * rstd
        dx = rstd * (g - mean_g - unit * mean_gn)
    else:
        rstd = jax.lax.rsqrt(_mean(s * s) + eps)
        unit = s * rstd
        dx = rstd * (g - unit * (_mean(g * s) * rstd))
    dx = dx if dstream is None else dx + dstream
    rows = tuple(range(stream.ndim - 1))
    dgain = None if gain is None else jnp.sum(dy * unit, rows).astype(gain.dtype)
    dshift = None if shift is None else jnp.sum(dy, rows).astype(shift.dtype)
    return dx.astype(stream.dtype), dgain, dshift


def _mean(a: jax.Array) -> jax.Array:
    return jnp.mean(a, -1, keepdims=True)


def _mapped_like(stream: jax.Array, *vectors: Any) -> jax.Array:
    """The stream, which under vmap is mapped wherever one of the vectors is; XLA removes the constant choice.

    JAX's vmap of a custom_vjp counts the cotangent of an output that is not mapped once for every mapped copy of the
    others (seen in jax 0.10.2).
    """
    for vector in vectors:
        stream = stream if vector is None else jnp.where(False, jnp.sum(vector).astype(stream.dtype), stream)
    return stream
