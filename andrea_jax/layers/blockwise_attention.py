"""Causal attention in blocks of queries that never stores all scores, with its own backward pass.

On a CPU one head at a time, so that its keys and values stay in the cache, on a GPU all at once; for each block of
queries only the keys that one of them may see. Saved for the backward pass: q, k, v, the output and the log of each
row's sum; the weights are computed again there (Rabe and Staats 2021; Dao et al. 2022).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from andrea_jax.layers.scores import Scores, capped, visible

FLOAT32 = {"preferred_element_type": jnp.float32}


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None,
    slopes_N: jax.Array | None,
    block: int,
) -> jax.Array:
    """softmax(score(q, k)) v over visible positions, [B, T, N, H] in q's dtype; memory O(T block) per head."""
    N, K = q_BTNH.shape[2], k_BTKH.shape[2]
    k_BTNH, v_BTNH = (x if N == K else jnp.repeat(x, N // K, axis=2) for x in (k_BTKH, v_BTKH))
    return _blockwise(q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N, (scores, block))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blockwise(q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N, how):
    return _forward(q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N, how)[0]


def _blocks(T, scores, block):
    """(start and stop of the queries, the first key that one of them may see), block by block."""
    for start in range(0, T, block):
        yield start, min(start + block, T), 0 if scores.window is None else max(0, start - scores.window + 1)


def _scores(q_tH, k_SH, segments_T, slope, start, first, scores):
    """float32 scores of the queries from `start` on against the keys from `first` to the last of them, capped; and the
    same with distances and -inf where not visible."""
    stop = start + q_tH.shape[0]
    capped_tS = capped(jnp.dot(q_tH, k_SH.T, **FLOAT32) * scores.scale, scores.soft_cap)
    distance_tS = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
    segments = (None, None) if segments_T is None else (segments_T[start:stop], segments_T[first:stop])
    seen_tS = visible(distance_tS, scores.window, *segments)
    scores_tS = capped_tS if slope is None else capped_tS - slope * distance_tS
    return capped_tS, jnp.where(seen_tS, scores_tS, -jnp.inf)


def _head_forward(how, q_TH, k_TH, v_TH, segments_T, slope):
    scores, block = how
    outputs, logsums = [], []
    for start, stop, first in _blocks(q_TH.shape[0], scores, block):
        _, scores_tS = _scores(q_TH[start:stop], k_TH[first:stop], segments_T, slope, start, first, scores)
        largest_t1 = scores_tS.max(-1, keepdims=True)
        weights_tS = jnp.exp(scores_tS - largest_t1)
        sum_t1 = weights_tS.sum(-1, keepdims=True)
        output_tH = jnp.dot(weights_tS.astype(v_TH.dtype), v_TH[first:stop], **FLOAT32) / sum_t1
        k_TH, v_TH, output_tH = _one_by_one(k_TH, v_TH, output_tH)
        outputs.append(output_tH)
        logsums.append((largest_t1 + jnp.log(sum_t1))[:, 0])
    return jnp.concatenate(outputs).astype(q_TH.dtype), jnp.concatenate(logsums)


def _head_backward(how, q_TH, k_TH, v_TH, segments_T, slope, y_TH, logsum_T, dy_TH):
    scores, block = how
    dtype = q_TH.dtype
    dk_TH, dv_TH, dqs = jnp.zeros(k_TH.shape, jnp.float32), jnp.zeros(v_TH.shape, jnp.float32), []
    shared_T = (dy_TH.astype(jnp.float32) * y_TH.astype(jnp.float32)).sum(-1)
    for start, stop, first in _blocks(q_TH.shape[0], scores, block):
        q_tH, dy_tH = q_TH[start:stop], dy_TH[start:stop]
        capped_tS, scores_tS = _scores(q_tH, k_TH[first:stop], segments_T, slope, start, first, scores)
        weights_tS = jnp.exp(scores_tS - logsum_T[start:stop, None])
        dweights_tS = jnp.dot(dy_tH, v_TH[first:stop].T, **FLOAT32)
        dscores_tS = weights_tS * (dweights_tS - shared_T[start:stop, None]) * scores.scale
        if scores.soft_cap is not None:
            dscores_tS = dscores_tS * (1 - jnp.square(capped_tS / scores.soft_cap))
        dscores_tS = dscores_tS.astype(dtype)
        dqs.append(jnp.dot(dscores_tS, k_TH[first:stop], **FLOAT32))
        dk_TH = dk_TH.at[first:stop].add(jnp.dot(dscores_tS.T, q_tH, **FLOAT32))
        dv_TH = dv_TH.at[first:stop].add(jnp.dot(weights_tS.astype(dtype).T, dy_tH, **FLOAT32))
        k_TH, v_TH, dk_TH, dv_TH = _one_by_one(k_TH, v_TH, dk_TH, dv_TH)
    return jnp.concatenate(dqs).astype(dtype), dk_TH.astype(dtype), dv_TH.astype(dtype)


def _on_gpu():
    return jax.default_backend() == "gpu"


def _one_by_one(*arrays):
    """What the next block reads and this one gave. On a GPU, where no loop keeps blocks apart, XLA would begin with the
    scores of all of them."""
    return jax.lax.optimization_barrier(arrays) if _on_gpu() else arrays


def _per_head(f, batch: int, heads: int, *arrays):
    """f over each head of each row: [B, T, N, H] arrays as [B * N, T, H]; [B, T] segments and [N] slopes repeated."""

    def split(x):
        if x is None or (x.shape[0] == batch * heads and x.ndim < 4):
            return x
        if x.ndim == 4:
            return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], x.shape[3])
        return jnp.tile(x, batch) if x.ndim == 1 else jnp.repeat(x, heads, axis=0)

    arrays = tuple(split(x) for x in arrays)
    results = jax.vmap(f)(*arrays) if _on_gpu() else jax.lax.map(lambda xs: f(*xs), arrays)
    return tuple(r.reshape(batch, heads, *r.shape[1:]).swapaxes(1, 2) if r.ndim == 3 else r for r in results)


def _forward(q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N, how):
    B, _, N, _ = q_BTNH.shape
    y_BTNH, logsum_MT = _per_head(partial(_head_forward, how), B, N, q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N)
    return y_BTNH, (q_BTNH, k_BTNH, v_BTNH, segments_BT, slopes_N, y_BTNH, logsum_MT)


def _backward(how, saved, dy_BTNH):
    B, _, N, _ = dy_BTNH.shape
    again = _one_by_one(*saved)  # else XLA would keep the scores of the forward pass
    dq, dk, dv = _per_head(partial(_head_backward, how), B, N, *again, dy_BTNH)
    return dq, dk, dv, None, jax.tree.map(jnp.zeros_like, saved[4])  # the slopes are constants of the model


_blockwise.defvjp(_forward, _backward)
