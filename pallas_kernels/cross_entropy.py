"""The losses of rows of logits together with their gradient, for a head that never holds the logits of a batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy_kernel, dispatch
from pallas_kernels.dispatch import Implementation

OPERATION = "cross_entropy"


def losses_and_gradient(
    logits_RV: jax.Array,
    labels_R: jax.Array,
    weights_R: jax.Array,
    vocab_size: int,
    z_loss: float = 0.0,
    dtype: Any = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logsum [R], nll [R], dlogits [R, V]); float32, float32, and `dtype` (of the logits if None).

    logsum = ln sum_{v < vocab_size} exp(logits_v), nll = logsum - logits_label, and dlogits is the gradient of
    sum w (nll + z_loss logsum^2): w (1 + 2 z_loss logsum) softmax(logits) - w onehot(label). Columns from
    `vocab_size` on do not exist and rows with w = 0 do not count: their gradients are 0, whatever they hold. A label
    outside the vocabulary counts as the nearest inside. Sums are float32.

    In units of C, one [R, V] array: 2C in the kernel (the label's logit is taken in passing; rows of more than
    cross_entropy_kernel.HELD columns are read again, from the cache). This is a gradient, and has none itself.

    Raises:
        UserError: an implementation that cannot run, with all reasons.
    """
    plan = dispatch.plan(OPERATION, logits_RV.shape, logits_RV.dtype, implementation, sums=True)
    options: dict[str, Any] = {"vocab_size": vocab_size, "z_loss": z_loss, "dtype": jnp.dtype(dtype or logits_RV.dtype)}
    pallas = functools.partial(cross_entropy_kernel.losses_and_gradient, **options)
    xla = functools.partial(xla_losses_and_gradient, **options)
    return dispatch.run(OPERATION, plan.forward, plan, pallas, xla, logits_RV, labels_R, weights_R)


def xla_losses_and_gradient(
    logits_RV: jax.Array, labels_R: jax.Array, weights_R: jax.Array, vocab_size: int, z_loss: float, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The plain-JAX form."""
    columns_V = jnp.arange(logits_RV.shape[1])
    logits_RV = jnp.where(columns_V < vocab_size, logits_RV.astype(jnp.float32), -jnp.inf)
    hit_RV = columns_V == jnp.clip(labels_R, 0, vocab_size - 1)[:, None]
    top_R1 = logits_RV.max(-1, keepdims=True)
    total_R1 = jnp.exp(logits_RV - top_R1).sum(-1, keepdims=True)
    label_logit_R1 = jnp.where(hit_RV, logits_RV, 0).sum(-1, keepdims=True)
    logsum_R1, weights_R1 = top_R1 + jnp.log(total_R1), weights_R.astype(jnp.float32)[:, None]
    nll_R1 = top_R1 - label_logit_R1 + jnp.log(total_R1)  # top and label cancel exactly; logsum is rounded
    scale_R1 = weights_R1 * (1 + 2 * z_loss * logsum_R1) / total_R1
    dlogits_RV = scale_R1 * jnp.exp(logits_RV - top_R1) - jnp.where(hit_RV, weights_R1, 0)
    dlogits_RV = jnp.where(weights_R1 == 0, 0, dlogits_RV)
    return logsum_R1[:, 0], nll_R1[:, 0], dlogits_RV.astype(dtype)
