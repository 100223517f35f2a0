"""Causal attention in blocks of queries that never stores all scores, with its own backward pass.

One head at a time, so that its keys and values stay in the cache; for each block of queries only the keys up to the
block's end. Saved for the backward pass: q, k, v, the output and the log of each row's sum; the weights are computed
again there (Rabe and Staats 2021; Dao et al. 2022).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

FLOAT32 = {"preferred_element_type": jnp.float32}


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array | None, block: int
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over visible positions, [B, T, N, H] in q's dtype; memory O(T block) per head."""
    return _forward(q_BTNH, k_BTNH, v_BTNH, segments_BT, block)[0]


def _scores(q_tH, k_SH, segments_T, start: int):
    """float32 scores of the queries from `start` on against the keys up to the last of them; -inf where not visible."""
    stop = start + q_tH.shape[0]
    scores_tS = jnp.dot(q_tH, k_SH.T, **FLOAT32) * q_tH.shape[-1] ** -0.5
    visible_tS = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
    if segments_T is not None:
        visible_tS &= segments_T[start:stop, None] == segments_T[None, :stop]
    return jnp.where(visible_tS, scores_tS, -jnp.inf)


def _head_forward(block: int, q_TH, k_TH, v_TH, segments_T):
    outputs, logsums = [], []
    for start in range(0, q_TH.shape[0], block):
        stop = min(start + block, q_TH.shape[0])
        scores_tS = _scores(q_TH[start:stop], k_TH[:stop], segments_T, start)
        largest_t1 = scores_tS.max(-1, keepdims=True)
        weights_tS = jnp.exp(scores_tS - largest_t1)
        sum_t1 = weights_tS.sum(-1, keepdims=True)
        outputs.append(jnp.dot(weights_tS.astype(v_TH.dtype), v_TH[:stop], **FLOAT32) / sum_t1)
        logsums.append((largest_t1 + jnp.log(sum_t1))[:, 0])
    return jnp.concatenate(outputs).astype(q_TH.dtype), jnp.concatenate(logsums)


def _head_backward(block: int, q_TH, k_TH, v_TH, segments_T, y_TH, logsum_T, dy_TH):
    scale, dtype = q_TH.shape[-1] ** -0.5, q_TH.dtype
    dk_TH, dv_TH, dqs = jnp.zeros(k_TH.shape, jnp.float32), jnp.zeros(v_TH.shape, jnp.float32), []
    shared_T = (dy_TH.astype(jnp.float32) * y_TH.astype(jnp.float32)).sum(-1)
    for start in range(0, q_TH.shape[0], block):
        stop = min(start + block, q_TH.shape[0])
        q_tH, dy_tH = q_TH[start:stop], dy_TH[start:stop]
        weights_tS = jnp.exp(_scores(q_tH, k_TH[:stop], segments_T, start) - logsum_T[start:stop, None])
        dweights_tS = jnp.dot(dy_tH, v_TH[:stop].T, **FLOAT32)
        dscores_tS = (weights_tS * (dweights_tS - shared_T[start:stop, None]) * scale).astype(dtype)
        dqs.append(jnp.dot(dscores_tS, k_TH[:stop], **FLOAT32))
        dk_TH = dk_TH.at[:stop].add(jnp.dot(dscores_tS.T, q_tH, **FLOAT32))
        dv_TH = dv_TH.at[:stop].add(jnp.dot(weights_tS.astype(dtype).T, dy_tH, **FLOAT32))
    return jnp.concatenate(dqs).astype(dtype), dk_TH.astype(dtype), dv_TH.astype(dtype)


def _per_head(f, batch: int, heads: int, *arrays):
    """f over each head of each row: [B, T, N, H] arrays as [B * N, T, H], [B, T] segments repeated for each head."""

    def split(x):
        if x is None:
            return None
        if x.ndim == 4:
            return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], x.shape[3])
        return x if x.shape[0] == batch * heads else jnp.repeat(x, heads, axis=0)

    results = jax.lax.map(lambda xs: f(*xs), tuple(split(x) for x in arrays))
    return tuple(r.reshape(batch, heads, *r.shape[1:]).swapaxes(1, 2) if r.ndim == 3 else r for r in results)


def _forward(q_BTNH, k_BTNH, v_BTNH, segments_BT, block):
    B, _, N, _ = q_BTNH.shape
    y_BTNH, logsum_MT = _per_head(partial(_head_forward, block), B, N, q_BTNH, k_BTNH, v_BTNH, segments_BT)
    return y_BTNH, (q_BTNH, k_BTNH, v_BTNH, segments_BT, y_BTNH, logsum_MT)


def _backward(block, saved, dy_BTNH):
    B, _, N, _ = dy_BTNH.shape
    dq, dk, dv = _per_head(partial(_head_backward, block), B, N, *saved, dy_BTNH)
    return dq, dk, dv, None


blockwise_attention.defvjp(_forward, _backward)
