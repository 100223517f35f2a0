"""Cross-entropy that never holds the logits of a whole batch, and the one loss of training and evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.model import ENGINE, hidden_forward, output_matrix
from andrea_jax.parameters import Params

Batch = dict[str, Any]  # tokens_BT, targets_BT int32; weights_BT float32 (0: ignored); segments_BT int32, optional


def loss_fn(
    params: Params,
    batch: Batch,
    config: ModelConfig,
    engine: EngineConfig = ENGINE,
    z_loss: float = 0.0,
    dropout_key: jax.Array | None = None,
    total_weight: jax.Array | float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean over the batch's token weights of -ln p(target) + z_loss * logsumexp(logits)^2, float32.

    Divides by `total_weight` instead where the batch is a part of a larger one. Metrics: `nll`, the sum of
    weight * -ln p(target) in nats, and `weight`, the sum of weights.
    """
    x_BTD = hidden_forward(params, batch["tokens_BT"], config, engine, batch.get("segments_BT"), dropout_key)
    head_DV, weights_BT = output_matrix(params, config), batch["weights_BT"].astype(jnp.float32)
    total, nll = cross_entropy(
        x_BTD, head_DV, batch["targets_BT"], weights_BT, config.vocab_size, z_loss, engine.loss_chunk
    )
    weight = weights_BT.sum()
    loss = total / jnp.maximum(weight if total_weight is None else total_weight, 1e-9)
    return loss, {"nll": nll, "weight": weight}


def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    vocab_size: int,
    z_loss: float = 0.0,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """sum w (nll + z_loss logsumexp^2), and sum w nll without a gradient; nll = logsumexp(x head) - (x head)[label].

    float32 scalars. Rows with w = 0 count for nothing, whatever their label. Columns from `vocab_size` on do not exist.
    Differentiable in x, head and w. At most max(chunk, B) rows of logits are held at a time (chunk 0: about 64 MiB of
    them). The gradient is computed beside the loss, so that they are formed once (as in Liger Kernel, Hsu et al. 2024).
    """
    B, T, _ = x_BTD.shape
    rows = chunk or max(1, 2**24 // head_DV.shape[1])
    columns = min(T, max(1, rows // B))
    total, nll = _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, vocab_size, z_loss, columns)
    return total, jax.lax.stop_gradient(nll)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, vocab_size, z_loss, columns):
    def chunk_sums(sums, chunk):
        x_RD, labels_R, weights_R = chunk
        _, _, nll_R, loss_R = _row_losses(x_RD, head_DV, labels_R, vocab_size, z_loss)
        return (sums[0] + _weighted(weights_R, loss_R), sums[1] + _weighted(weights_R, nll_R)), None

    sums, _ = _scan(chunk_sums, (jnp.float32(0), jnp.float32(0)), _chunks(columns, x_BTD, labels_BT, weights_BT))
    return sums


def _forward(x_BTD, head_DV, labels_BT, weights_BT, vocab_size, z_loss, columns):
    dtype = x_BTD.dtype

    def chunk_sums_and_gradients(carry, chunk):
        total, nll, dhead_DV = carry
        x_RD, labels_R, weights_R = chunk
        logits_RV, logsum_R, nll_R, loss_R = _row_losses(x_RD, head_DV, labels_R, vocab_size, z_loss)
        weights_R1 = weights_R[:, None]
        scale_R1 = weights_R1 * (1 + 2 * z_loss * logsum_R[:, None])
        hit_RV = jnp.arange(logits_RV.shape[1]) == labels_R[:, None]
        dlogits_RV = scale_R1 * jnp.exp(logits_RV - logsum_R[:, None]) - jnp.where(hit_RV, weights_R1, 0)
        dlogits_RV = dlogits_RV.astype(dtype)
        dx_RD = jnp.dot(dlogits_RV, head_DV.astype(dtype).T)
        dhead_DV = dhead_DV + jnp.dot(x_RD.T, dlogits_RV, preferred_element_type=jnp.float32)
        return (total + _weighted(weights_R, loss_R), nll + _weighted(weights_R, nll_R), dhead_DV), (dx_RD, loss_R)

    start = (jnp.float32(0), jnp.float32(0), jnp.zeros(head_DV.shape, jnp.float32))
    chunks = _chunks(columns, x_BTD, labels_BT, weights_BT)
    (total, nll, dhead_DV), (dx, loss) = _scan(chunk_sums_and_gradients, start, chunks)
    dx_BTD, loss_BT = _unchunk(dx, x_BTD.shape), _unchunk(loss, labels_BT.shape)
    return (total, nll), (dx_BTD, dhead_DV.astype(head_DV.dtype), loss_BT.astype(weights_BT.dtype))


def _backward(vocab_size, z_loss, columns, saved, cotangents):
    dx_BTD, dhead_DV, dweights_BT = ((cotangents[0] * s).astype(s.dtype) for s in saved)  # scaled in float32
    return dx_BTD, dhead_DV, None, dweights_BT


_cross_entropy.defvjp(_forward, _backward)


def _row_losses(x_RD, head_DV, labels_R, vocab_size, z_loss):
    """float32 logits (-inf from `vocab_size` on), logsumexp, nll, and nll + z_loss * logsumexp^2 of each row."""
    logits_RV = jnp.dot(x_RD, head_DV.astype(x_RD.dtype), preferred_element_type=jnp.float32)
    if vocab_size < logits_RV.shape[1]:
        logits_RV = jnp.where(jnp.arange(logits_RV.shape[1]) < vocab_size, logits_RV, -jnp.inf)
    logsum_R = jax.nn.logsumexp(logits_RV, axis=-1)
    inside_R = jnp.clip(labels_R, 0, vocab_size - 1)
    nll_R = logsum_R - jnp.take_along_axis(logits_RV, inside_R[:, None], axis=-1)[:, 0]
    return logits_RV, logsum_R, nll_R, nll_R + z_loss * jnp.square(logsum_R)


def _weighted(weights_R, values_R):
    return jnp.where(weights_R == 0, 0, weights_R * values_R).sum()


def _chunks(columns, *arrays):
    """Each [B, T, ...] array as [T / columns, B * columns, ...], the last chunk padded with zeros (weight 0).

    Cut along T, so that a batch sharded over B stays where it is.
    """

    def cut(x):
        B, T = x.shape[:2]
        count = -(-T // columns)
        x = jnp.pad(x, [(0, 0), (0, count * columns - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, count, columns, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(count, B * columns, *x.shape[3:])

    return tuple(cut(x) for x in arrays)


def _unchunk(x, shape):
    B, T = shape[:2]
    x = x.reshape(x.shape[0], B, -1, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(B, -1, *x.shape[3:])[:, :T]


def _scan(step, carry, chunks):
    """lax.scan, without a loop where there is one chunk."""
    if chunks[0].shape[0] > 1:
        return jax.lax.scan(step, carry, chunks)
    carry, out = step(carry, tuple(x[0] for x in chunks))
    return carry, jax.tree.map(lambda x: x[None], out)
