"""Keys and values of past positions, kept so that a new token costs one position instead of a whole window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import causal_attend
from andrea_jax.layers.position import rotate
from andrea_jax.layers.scores import attend_to_past
from andrea_jax.model import block_forward, final_norm, output_logits
from andrea_jax.parameters import Params


class KeyValueCache(NamedTuple):
    """Keys, rotated where the model rotates them, and values [L, B, S, K, H] in the engine's dtype; S is the context
    length."""

    k: jax.Array
    v: jax.Array


def empty_cache(batch: int, config: ModelConfig, engine: EngineConfig) -> KeyValueCache:
    """Zeros; no position is written yet."""
    shape = (config.n_layer, batch, config.context_length, config.kv_heads, config.head_dim)
    return KeyValueCache(jnp.zeros(shape, engine.activation_dtype), jnp.zeros(shape, engine.activation_dtype))


def prefill(
    params: Params,
    cache: KeyValueCache,
    tokens_BT: jax.Array,
    rows_B: jax.Array,
    config: ModelConfig,
    engine: EngineConfig,
) -> KeyValueCache:
    """The cache with positions 0 to T - 1 written in the rows where `rows_B` is true; other rows stay.

    Rows are padded on the right with any ids: what stands behind a row's last token is written again before
    `decode_step` looks at it, and no earlier position attends to it.
    """
    T = tokens_BT.shape[1]
    positions_T = jnp.arange(T)

    def attend(past, layer, q_BTNH, k_BTKH, v_BTKH):
        attended_BTNH = causal_attend(config, engine, layer=layer)(q_BTNH, k_BTKH, v_BTKH)
        return attended_BTNH, KeyValueCache(rotate(k_BTKH, positions_T, config, config.sees_all(layer)), v_BTKH)

    _, new = _run_blocks(params, tokens_BT, positions_T, None, attend, config, engine)
    chosen = rows_B[:, None, None, None]
    return jax.tree.map(lambda old, new: old.at[:, :, :T].set(jnp.where(chosen, new, old[:, :, :T])), cache, new)


def decode_step(
    params: Params,
    cache: KeyValueCache,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    config: ModelConfig,
    engine: EngineConfig,
) -> tuple[jax.Array, KeyValueCache]:
    """float32 logits [B, V] behind one more token a row, and the cache with that token written at its position.

    Row b's token stands at position `positions_B[b]` below the context length; all before it must have been written.
    """
    rows_B, positions_B1 = jnp.arange(len(tokens_B)), positions_B[:, None]

    def attend(past, layer, q_B1NH, k_B1KH, v_B1KH):
        sees_all = config.sees_all(layer)
        q_B1NH, k_B1KH = (rotate(x, positions_B1, config, sees_all) for x in (q_B1NH, k_B1KH))
        k_BSKH = past.k.at[rows_B, positions_B].set(k_B1KH[:, 0])
        v_BSKH = past.v.at[rows_B, positions_B].set(v_B1KH[:, 0])
        attended_BNH = attend_to_past(q_B1NH[:, 0], k_BSKH, v_BSKH, positions_B, config, sees_all)
        return attended_BNH[:, None], KeyValueCache(k_B1KH, v_B1KH)

    x_B1D, new = _run_blocks(params, tokens_B[:, None], positions_B1, cache, attend, config, engine)
    cache = jax.tree.map(lambda old, new: old.at[:, rows_B, positions_B].set(new[:, :, 0]), cache, new)
    return output_logits(params, final_norm(params, x_B1D[:, 0], config), config), cache


def _run_blocks(
    params: Params,
    tokens_BT: jax.Array,
    positions: jax.Array,
    past: KeyValueCache | None,
    attend: Callable[..., tuple[jax.Array, KeyValueCache]],
    config: ModelConfig,
    engine: EngineConfig,
) -> tuple[jax.Array, KeyValueCache]:
    """x after all blocks, and the keys and values of its `positions` [T] or [B, T], [L, B, T, K, H], as `attend` keeps
    them.

    Always a scan: unrolled, each step would copy every layer's weights out of the stack.
    """
    x_BTD = params["token_embedding"][tokens_BT] * config.embedding_scale
    if config.position == "learned":
        x_BTD = x_BTD + params["position_embedding"][positions]

    def block(x_BTD: jax.Array, block_layer: Any) -> tuple[jax.Array, KeyValueCache]:
        p, past, layer = block_layer
        kept = []

        def attend_and_keep(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            attended, new = attend(past, layer, q, k, v)
            kept.append(new)
            return attended

        return block_forward(p, x_BTD, config, attend_and_keep), kept[0]

    blocks = (params["blocks"], past, jnp.arange(config.n_layer))
    return jax.lax.scan(block, x_BTD.astype(engine.activation_dtype), blocks)
