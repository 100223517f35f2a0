"""Losses and gradient of rows of logits in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def losses_and_gradient(
    logits_RV: jax.Array, labels_R: jax.Array, weights_R: jax.Array, vocab_size: int, z_loss: float, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See pallas_kernels.cross_entropy. Three passes over the logits: maximum, sum, gradient."""
    label_R1, weights_R1 = jnp.clip(labels_R, 0, vocab_size - 1)[:, None], weights_R.astype(jnp.float32)[:, None]
    label_logit_R1 = jnp.take_along_axis(logits_RV, label_R1, axis=-1).astype(jnp.float32)
    columns_V = jnp.arange(logits_RV.shape[1])
    logits_RV = logits_RV.astype(jnp.float32)
    if vocab_size < logits_RV.shape[1]:
        logits_RV = jnp.where(columns_V < vocab_size, logits_RV, -jnp.inf)
    top_R1 = logits_RV.max(-1, keepdims=True)
    log_total_R1 = jnp.log(jnp.exp(logits_RV - top_R1).sum(-1, keepdims=True))
    logsum_R1 = top_R1 + log_total_R1
    nll_R1 = top_R1 - label_logit_R1 + log_total_R1  # top and label cancel exactly; logsum is rounded
    # Another exp than above: one for both is stored by XLA on a CPU. The scale makes up for the rounding of logsum.
    scale_R1 = weights_R1 * (1 + 2 * z_loss * logsum_R1) * jnp.exp(logsum_R1 - top_R1 - log_total_R1)
    dlogits_RV = scale_R1 * jnp.exp(logits_RV - logsum_R1) - jnp.where(columns_V == label_R1, weights_R1, 0)
    dlogits_RV = jnp.where(weights_R1 == 0, 0, dlogits_RV)
    return logsum_R1[:, 0], nll_R1[:, 0], dlogits_RV.astype(dtype)
