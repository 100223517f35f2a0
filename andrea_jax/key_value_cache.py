"""Keys and values of past positions, kept so that a new token costs one position instead of a whole window."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import causal_attend
from andrea_jax.layers.norm import layer_norm
from andrea_jax.model import block_forward, output_matrix
from andrea_jax.parameters import Params


class KeyValueCache(NamedTuple):
    """Keys and values [L, B, S, N, H] in the engine's dtype; S is the context length."""

    k: jax.Array
    v: jax.Array


def empty_cache(batch: int, config: ModelConfig, engine: EngineConfig) -> KeyValueCache:
    """Zeros; no position is written yet."""
    shape = (config.n_layer, batch, config.context_length, config.n_head, config.head_dim)
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
    x_BTD = (params["token_embedding"][tokens_BT] + params["position_embedding"][:T]).astype(engine.activation_dtype)
    causal = causal_attend(engine)
    _, new = _run_blocks(params, x_BTD, None, lambda past, q, k, v: causal(q, k, v), config)
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
    rows_B = jnp.arange(len(tokens_B))
    visible_BS = jnp.arange(config.context_length) <= positions_B[:, None]

    def attend(past: KeyValueCache, q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> jax.Array:
        k_BSNH = past.k.at[rows_B, positions_B].set(k_BTNH[:, 0])
        v_BSNH = past.v.at[rows_B, positions_B].set(v_BTNH[:, 0])
        scores_BNS = jnp.einsum("BNH,BSNH->BNS", q_BTNH[:, 0], k_BSNH, preferred_element_type=jnp.float32)
        scores_BNS = jnp.where(visible_BS[:, None], scores_BNS * config.head_dim**-0.5, -jnp.inf)
        weights_BNS = jax.nn.softmax(scores_BNS, axis=-1).astype(v_BSNH.dtype)
        return jnp.einsum("BNS,BSNH->BNH", weights_BNS, v_BSNH)[:, None]

    x_BD = (params["token_embedding"][tokens_B] + params["position_embedding"][positions_B]).astype(
        engine.activation_dtype
    )
    x_BTD, new = _run_blocks(params, x_BD[:, None], cache, attend, config)
    cache = jax.tree.map(lambda old, new: old.at[:, rows_B, positions_B].set(new[:, :, 0]), cache, new)
    _, x_BD = layer_norm(params["final_norm"], x_BTD[:, 0], config.norm_eps)
    head_DV = output_matrix(params, config)[:, : config.vocab_size]
    return jnp.matmul(x_BD, head_DV.astype(x_BD.dtype), preferred_element_type=jnp.float32), cache


def _run_blocks(
    params: Params, x_BTD: jax.Array, past: KeyValueCache | None, attend: Callable[..., jax.Array], config: ModelConfig
) -> tuple[jax.Array, KeyValueCache]:
    """x after all blocks, and the keys and values of its positions, [L, B, T, N, H]; `attend(past, q, k, v)` attends.

    Always a scan: unrolled, each step would copy every layer's weights out of the stack.
    """

    def block(x_BTD: jax.Array, layer: tuple[Params, KeyValueCache | None]) -> tuple[jax.Array, KeyValueCache]:
        p, past = layer
        new = []

        def remember_and_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            new.append(KeyValueCache(k, v))
            return attend(past, q, k, v)

        return block_forward(p, x_BTD, config, remember_and_attend), new[0]

    return jax.lax.scan(block, x_BTD, (params["blocks"], past))
