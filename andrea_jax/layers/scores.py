"""From queries and keys to attention weights, written out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig
from andrea_jax.layers.position import alibi_slopes


class Scores(NamedTuple):
    """score = cap tanh(scale q k / cap) - slope distance, for distances below `window`."""

    scale: float
    soft_cap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, config: ModelConfig, sees_all: bool) -> Scores:
        """Those of a block."""
        return cls(config.score_scale, config.attention_soft_cap, None if sees_all else config.window)


def capped(values: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(values / cap), or the values without a cap (Gemma 2 2024)."""
    return values if cap is None else cap * jnp.tanh(values / cap)


def visible(
    distance: jax.Array, window: jax.Array | int | None, segments_t: jax.Array | None, segments_S: jax.Array | None
) -> jax.Array:
    """Where the key is not later than the query, within the window and of the same segment."""
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if segments_t is None or segments_S is None:
        return seen
    return seen & (segments_t[..., :, None] == segments_S[..., None, :])


def explicit_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
) -> jax.Array:
    """The formula, with all scores [B, K, G, T, T] at once; [B, T, N, H] in q's dtype."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    products = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = capped(products * scores.scale, scores.soft_cap)
    distance_TS = jnp.arange(T)[:, None] - jnp.arange(T)
    if slopes_N is not None:
        scores_BKGTS = scores_BKGTS - slopes_N.reshape(K, N // K, 1, 1) * distance_TS
    seen = visible(distance_TS, scores.window, segments_BT, segments_BT)
    seen = seen if seen.ndim == 2 else seen[:, None, None]
    weights_BKGTS = jax.nn.softmax(jnp.where(seen, scores_BKGTS, -jnp.inf), axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH).reshape(B, T, N, H)


def attend_to_past(
    q_BNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_B: jax.Array,
    config: ModelConfig,
    sees_all: jax.Array | bool,
) -> jax.Array:
    """One query a row, at its position, over the keys up to it: [B, N, H] in q's dtype."""
    B, N, H = q_BNH.shape
    S, K = k_BSKH.shape[1:3]
    scores = Scores.of(config, sees_all=False)
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    products = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGS = capped(products * scores.scale, scores.soft_cap)
    distance_BS = positions_B[:, None] - jnp.arange(S)
    if config.position == "alibi":
        slopes_KG1 = jnp.asarray(alibi_slopes(N)).reshape(K, N // K, 1)
        scores_BKGS = scores_BKGS - slopes_KG1 * distance_BS[:, None, None]
    window = None if scores.window is None else jnp.where(sees_all, S, scores.window)
    seen_BS = visible(distance_BS, window, None, None)
    weights_BKGS = jax.nn.softmax(jnp.where(seen_BS[:, None, None], scores_BKGS, -jnp.inf), axis=-1)
    return jnp.einsum("BKGS,BSKH->BKGH", weights_BKGS.astype(v_BSKH.dtype), v_BSKH).reshape(B, N, H)
