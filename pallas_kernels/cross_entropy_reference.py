"""What cross_entropy computes, in float64 NumPy, from the formula."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.reference import Array, wide


def losses_and_gradient(
    logits_RV: Any, labels_R: Any, weights_R: Any, vocab_size: int, z_loss: float = 0.0
) -> tuple[Array, Array, Array]:
    """(logsum, nll, dlogits), the gradient by the chain rule: dlogsum/dlogits is the softmax."""
    x, w = wide(logits_RV)[:, :vocab_size], wide(weights_R)[:, None]
    top = x.max(-1, keepdims=True)
    logsum = top + np.log(np.exp(x - top).sum(-1, keepdims=True))
    onehot = np.arange(vocab_size) == np.clip(np.asarray(labels_R), 0, vocab_size - 1)[:, None]
    softmax = np.exp(x - logsum)
    dlogits = np.zeros(np.shape(logits_RV))
    dlogits[:, :vocab_size] = w * (softmax - onehot) + w * z_loss * 2 * logsum * softmax
    return logsum[:, 0], (logsum - (x * onehot).sum(-1, keepdims=True))[:, 0], dlogits
