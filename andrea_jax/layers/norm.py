"""Normalisation of the residual stream, and of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.sharding import constrain, named
from pallas_kernels.dispatch import Implementation
from pallas_kernels.residual_norm import residual_norm


def norm(
    p: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    config: ModelConfig,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
    delta_BTD: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(s, normed): s = x + delta; normed of the config's kind, over D, in float32, in x's dtype.

    layer: gain * (s - mean) / sqrt(var + eps) + shift (Ba, Kiros and Hinton 2016). rms: gain * s / sqrt(mean(s^2) +
    eps) + shift (Zhang and Sennrich 2019). none: s. `gain` and `shift` [D] may each be absent. Going on with the s that
    is returned lets backward add its gradient in the norm's own kernel.
    """
    x_BTD = constrain(x_BTD, mesh, "batch", None, None)
    if config.norm == "none":
        x_BTD = x_BTD if delta_BTD is None else x_BTD + delta_BTD
        return x_BTD, x_BTD
    sharding = None if mesh is None else named(mesh, "batch", None, None)
    gain, shift = p.get("gain"), p.get("shift")
    return residual_norm(x_BTD, delta_BTD, gain, shift, config.norm_eps, config.norm, implementation, sharding)


def head_norm(p: Mapping[str, jax.Array], x_BTNH: jax.Array, eps: float) -> jax.Array:
    """RMS norm over H with `gain` [H], of each head by itself (Henry et al. 2020)."""
    return residual_norm(x_BTNH, None, p["gain"], None, eps, "rms", "xla")[1]
