"""The output product with its cross-entropy, as the model's loss runs it."""

from __future__ import annotations

from typing import Any

import jax

from andrea_jax.loss import cross_entropy

CHUNK = 32_768  # rows; each chunk reads and writes the gradient of the head once


def head(
    V: int, x_ND: jax.Array, head_DV: jax.Array, labels_N: jax.Array, weights_N: jax.Array, implementation: Any
) -> jax.Array:
    """sum w nll over the first V columns of x head, at most CHUNK rows of logits at a time."""
    return cross_entropy(x_ND[None], head_DV, labels_N[None], weights_N[None], V, 0.0, CHUNK, implementation)[0]
