"""Layer normalisation of the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from andrea_jax.sharding import constrain, named
from pallas_kernels.dispatch import Implementation
from pallas_kernels.residual_norm import residual_norm


def layer_norm(
    p: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    eps: float,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(x, normed): normed = gain * (x - mean) / sqrt(var + eps) + shift over D, in float32, in x's dtype.

    `gain` and `shift` [D] may each be absent. Going on with the x that is returned lets backward add its gradient in
    the norm's own kernel. Ba, Kiros and Hinton 2016.
    """
    x_BTD = constrain(x_BTD, mesh, "batch", None, None)
    sharding = None if mesh is None else named(mesh, "batch", None, None)
    return residual_norm(x_BTD, None, p.get("gain"), p.get("shift"), eps, "layer", implementation, sharding)
