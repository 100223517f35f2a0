"""Layer normalisation."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def layer_norm(p: Mapping[str, jax.Array], x_BTD: jax.Array, eps: float) -> jax.Array:
    """gain * (x - mean) / sqrt(var + eps) + shift over D, in float32; the result has x's dtype.

    `gain` and `shift` [D] may each be absent. Ba, Kiros and Hinton 2016. The two-pass variance is exact far from
    zero, and XLA turns it into one kernel on a GPU.
    """
    x = x_BTD.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps)
    if "gain" in p:
        y = y * p["gain"]
    if "shift" in p:
        y = y + p["shift"]
    return y.astype(x_BTD.dtype)
