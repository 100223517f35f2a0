"""The losses of rows of logits together with their gradient, for a head that never holds the logits of a batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy_kernel, cross_entropy_xla, dispatch
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

    The kernel reads the logits and writes the gradient once (the label's logit is taken in passing; rows of more than
    cross_entropy_kernel.HELD columns are read again, from the cache); XLA reads them three times. Where nothing reads
    the gradient, XLA's form leaves it out. This is a gradient, and has none itself.

    Raises:
        UserError: an implementation that cannot run, with all reasons.
    """
    plan = dispatch.plan(OPERATION, logits_RV.shape, logits_RV.dtype, implementation, sums=True)
    options: dict[str, Any] = {"vocab_size": vocab_size, "z_loss": z_loss, "dtype": jnp.dtype(dtype or logits_RV.dtype)}
    pallas = functools.partial(cross_entropy_kernel.losses_and_gradient, **options)
    xla = functools.partial(cross_entropy_xla.losses_and_gradient, **options)
    return dispatch.run(OPERATION, plan.forward, plan, pallas, xla, logits_RV, labels_R, weights_R)
