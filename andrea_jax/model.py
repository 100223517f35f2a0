"""The model, as the lesson writes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import Attend, attention, causal_attend
from andrea_jax.layers.dropout import dropout, fold_in, row_keys
from andrea_jax.layers.embedding import embedding
from andrea_jax.layers.mlp import mlp
from andrea_jax.layers.norm import layer_norm
from andrea_jax.parameters import Params
from andrea_jax.settings import UserError
from andrea_jax.sharding import constrain, use
from pallas_kernels.dispatch import Implementation

ENGINE = EngineConfig()


def block_forward(
    p: Params,
    x_BTD: jax.Array,
    config: ModelConfig,
    attend: Attend | None = None,
    dropout_key: jax.Array | None = None,
    kernels: Implementation = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """One pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); x's dtype is kept.

    `p` is one layer's slice of `params["blocks"]`; `attend` maps q, k, v to their attention (causal if None);
    `dropout_key` is one key, or one for each row; over a `mesh` activations are split as sharding.py says.
    """
    attend = attend or causal_attend(ENGINE, mesh=mesh)
    key_1, key_2 = fold_in(dropout_key, 0), fold_in(dropout_key, 1)
    x_BTD, normed_BTD = layer_norm(p["attention_norm"], x_BTD, config.norm_eps, kernels, mesh)
    x_BTD = x_BTD + dropout(attention(p["attention"], normed_BTD, attend, mesh), config.dropout, key_1)
    x_BTD, normed_BTD = layer_norm(p["mlp_norm"], x_BTD, config.norm_eps, kernels, mesh)
    return x_BTD + dropout(mlp(p["mlp"], normed_BTD, config.activation, kernels, mesh), config.dropout, key_2)


def model_forward(
    params: Params,
    tokens_BT: jax.Array,
    config: ModelConfig,
    engine: EngineConfig = ENGINE,
    segments_BT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """float32 logits [B, T, V] for token ids [B, T], T at most `context_length`.

    Positions attend to earlier ones, with `segments_BT` only to those of their own segment. Dropout only with a key.

    Raises:
        UserError: more tokens than `context_length`.
    """
    x_BTD = hidden_forward(params, tokens_BT, config, engine, segments_BT, dropout_key, mesh)
    head_DV = use(output_matrix(params, config), x_BTD.dtype, mesh, "embed", "vocab")
    logits_BTV = jnp.matmul(x_BTD, head_DV, preferred_element_type=jnp.float32)
    return constrain(logits_BTV, mesh, "batch", None, "vocab")[..., : config.vocab_size]


def hidden_forward(
    params: Params,
    tokens_BT: jax.Array,
    config: ModelConfig,
    engine: EngineConfig = ENGINE,
    segments_BT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The normed residual stream [B, T, D] before the output product, in the engine's dtype."""
    B, T = tokens_BT.shape
    if T > config.context_length:
        raise UserError(f"{T} tokens, but context_length is {config.context_length}")
    token_VD = use(params["token_embedding"], jnp.float32, mesh, "vocab", "embed")
    position_TD = use(params["position_embedding"], jnp.float32, mesh, None, "embed")[:T]
    x_BTD = constrain(embedding(token_VD, tokens_BT, mesh) + position_TD, mesh, "batch", None, None)
    keys_B = row_keys(dropout_key, B)
    x_BTD = dropout(x_BTD, config.dropout, fold_in(keys_B, config.n_layer)).astype(engine.activation_dtype)
    attend = causal_attend(engine, segments_BT, mesh)

    def block(x_BTD: jax.Array, p: Params, layer: jax.Array | int) -> jax.Array:
        return block_forward(p, x_BTD, config, attend, fold_in(keys_B, layer), engine.kernels, mesh)

    if engine.remat == "block":
        block = jax.checkpoint(block)
    if engine.unrolled:
        for layer, p in enumerate(unstack(params["blocks"], config.n_layer)):
            x_BTD = block(x_BTD, p, layer)
    else:
        layers = (params["blocks"], jnp.arange(config.n_layer))
        x_BTD, _ = jax.lax.scan(lambda x_BTD, p_layer: (block(x_BTD, *p_layer), None), x_BTD, layers)
    return layer_norm(params["final_norm"], x_BTD, config.norm_eps, engine.kernels, mesh)[1]


def output_matrix(params: Params, config: ModelConfig) -> jax.Array:
    """[D, padded V]: the head, or the transposed token table where they are tied."""
    return params["token_embedding"].T if config.tie_embeddings else params["head"]


def unstack(stacked: Params, n_layer: int) -> list[Params]:
    """Each layer's slice. Splitting once makes the gradient one concatenation instead of a padded sum per layer."""
    leaves, tree = jax.tree.flatten(stacked)
    pieces = [[piece[0] for piece in jax.lax.split(leaf, [1] * n_layer)] for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*pieces, strict=True)]
