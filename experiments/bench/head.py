"""The output product with its cross-entropy in chunks of rows, the gradient beside the loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import losses_and_gradient

CHUNK = 32_768  # rows; each chunk reads and writes the gradient of the head once


def head(
    V: int, x_ND: jax.Array, head_DV: jax.Array, labels_N: jax.Array, weights_N: jax.Array, implementation: Any
) -> jax.Array:
    """sum w nll over the first V columns of x head, logits in x's dtype; at most CHUNK rows of them at a time."""
    return _head(x_ND, head_DV, labels_N, weights_N, V, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _head(x_ND: Any, head_DV: Any, labels_N: Any, weights_N: Any, V: int, implementation: Any) -> jax.Array:
    return _forward(x_ND, head_DV, labels_N, weights_N, V, implementation)[0]


def _forward(x_ND: Any, head_DV: Any, labels_N: Any, weights_N: Any, V: int, implementation: Any) -> Any:
    narrow_DV = head_DV.astype(x_ND.dtype)

    def chunk(carry: Any, rows: Any) -> Any:
        total, dhead_DV = carry
        x_RD, labels_R, weights_R = rows
        logits_RV = x_RD @ narrow_DV
        _, nll_R, dlogits_RV = losses_and_gradient(logits_RV, labels_R, weights_R, V, implementation=implementation)
        dhead_DV = dhead_DV + jnp.dot(x_RD.T, dlogits_RV, preferred_element_type=dhead_DV.dtype)
        return (total + jnp.sum(weights_R * nll_R), dhead_DV), (dlogits_RV @ narrow_DV.T, nll_R)

    N = x_ND.shape[0]
    rows = N if N <= CHUNK else math.gcd(N, CHUNK)
    chunks = tuple(a.reshape(-1, rows, *a.shape[1:]) for a in (x_ND, labels_N, weights_N))
    start = (jnp.zeros((), head_DV.dtype), jnp.zeros_like(head_DV))
    (total, dhead_DV), (dx, nll) = jax.lax.scan(chunk, start, chunks)
    return total, (dx.reshape(x_ND.shape), dhead_DV, nll.reshape(labels_N.shape))


def _backward(V: int, implementation: Any, saved: Any, dtotal: jax.Array) -> Any:
    dx_ND, dhead_DV, nll_N = ((dtotal * s).astype(s.dtype) for s in saved)
    return dx_ND, dhead_DV, None, nll_N


_head.defvjp(_forward, _backward)
