"""The model, as the lesson writes it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import Attend, attention, causal_attend
from andrea_jax.layers.dropout import dropout, fold_in, row_keys
from andrea_jax.layers.embedding import embedding
from andrea_jax.layers.mlp import mlp
from andrea_jax.layers.moe import moe
from andrea_jax.layers.norm import norm
from andrea_jax.layers.residual import enter_branch, leave_branch
from andrea_jax.layers.routing import Routing
from andrea_jax.layers.scores import capped
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
    """One block; pre-norm: x + attention(norm(x)), then x + mlp(norm(x)). x's dtype is kept.

    `p` is one layer's slice of `params["blocks"]`; `attend` maps q, k, v to their attention (that of the first block if
    None); `dropout_key` is one key, or one for each row; over a `mesh` activations are split as sharding.py says.
    """
    return block_and_routing(p, x_BTD, config, attend, dropout_key, kernels, mesh)[0]


def block_and_routing(
    p: Params,
    x_BTD: jax.Array,
    config: ModelConfig,
    attend: Attend | None = None,
    dropout_key: jax.Array | None = None,
    kernels: Implementation = "auto",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Routing]:
    """`block_forward`, and what its router did with each row; {} where there is none."""
    attend = attend or causal_attend(config, ENGINE, mesh=mesh)
    enter = partial(enter_branch, p, config=config, kernels=kernels, mesh=mesh)
    leave = partial(leave_branch, p, config=config, keys=dropout_key, kernels=kernels, mesh=mesh)
    x_BTD, normed_BTD = enter("attention", x_BTD)
    x_BTD = leave("attention", x_BTD, attention(p["attention"], normed_BTD, config, attend, mesh))
    if not config.parallel_block:
        x_BTD, normed_BTD = enter("mlp", x_BTD)
    if config.n_expert is None:
        return leave("mlp", x_BTD, mlp(p["mlp"], normed_BTD, config, kernels, mesh)), {}
    y_BTD, routing = moe(p["moe"], normed_BTD, config, kernels, mesh)
    return leave("mlp", x_BTD, y_BTD), routing


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
    return output_logits(params, x_BTD, config, mesh)


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
    return hidden_and_routing(params, tokens_BT, config, engine, segments_BT, dropout_key, mesh)[0]


def hidden_and_routing(
    params: Params,
    tokens_BT: jax.Array,
    config: ModelConfig,
    engine: EngineConfig = ENGINE,
    segments_BT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Routing]:
    """`hidden_forward`, and what each block's router did with each row [L, B, ...]."""
    B, T = tokens_BT.shape
    if T > config.context_length:
        raise UserError(f"{T} tokens, but context_length is {config.context_length}")
    token_VD = use(params["token_embedding"], jnp.float32, mesh, "vocab", "embed")
    x_BTD = embedding(token_VD, tokens_BT, mesh) * config.embedding_scale
    if config.position == "learned":
        x_BTD = x_BTD + use(params["position_embedding"], jnp.float32, mesh, None, "embed")[:T]
    x_BTD = constrain(x_BTD, mesh, "batch", None, None)
    keys_B = row_keys(dropout_key, B)
    x_BTD = dropout(x_BTD, config.dropout, fold_in(keys_B, config.n_layer)).astype(engine.activation_dtype)

    def block(x_BTD: jax.Array, p: Params, layer: jax.Array | int) -> tuple[jax.Array, Routing]:
        attend = causal_attend(config, engine, segments_BT, mesh, layer)
        return block_and_routing(p, x_BTD, config, attend, fold_in(keys_B, layer), engine.kernels, mesh)

    if engine.remat == "block":
        block = jax.checkpoint(block, static_argnums=(2,) if engine.unrolled else ())
    if engine.unrolled:
        layers = []
        for layer, p in enumerate(unstack(params["blocks"], config.n_layer)):
            x_BTD, one = block(x_BTD, p, layer)
            layers.append(one)
        routing = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    else:
        stacked = (params["blocks"], jnp.arange(config.n_layer))
        x_BTD, routing = jax.lax.scan(lambda x_BTD, p_layer: block(x_BTD, *p_layer), x_BTD, stacked)
    return final_norm(params, x_BTD, config, engine.kernels, mesh), routing


def final_norm(
    params: Params, x_BTD: jax.Array, config: ModelConfig, kernels: Implementation = "auto", mesh: Mesh | None = None
) -> jax.Array:
    """What the output product reads: the stream, normed and scaled as the config says."""
    if config.final_norm:
        _, x_BTD = norm(params["final_norm"], x_BTD, config, kernels, mesh)
    return x_BTD if config.output_scale == 1 else x_BTD * config.output_scale


def output_logits(params: Params, x: jax.Array, config: ModelConfig, mesh: Mesh | None = None) -> jax.Array:
    """float32 logits [..., V] of the stream [..., D] behind the final norm.

    Padding is cut from the logits: cut from the head it would be a copy of the head at every decoded token.
    """
    head_DV = use(output_matrix(params, config), x.dtype, mesh, "embed", "vocab")
    logits = jnp.matmul(x, head_DV, preferred_element_type=jnp.float32)
    logits = constrain(logits, mesh, "batch", *(None,) * (x.ndim - 2), "vocab")[..., : config.vocab_size]
    return capped(logits, config.logit_soft_cap)


def output_matrix(params: Params, config: ModelConfig) -> jax.Array:
    """[D, padded V]: the head, or the transposed token table where they are tied."""
    return params["token_embedding"].T if config.tie_embeddings else params["head"]


def unstack(stacked: Params, n_layer: int) -> list[Params]:
    """Each layer's slice. Splitting once makes the gradient one concatenation instead of a padded sum per layer."""
    leaves, tree = jax.tree.flatten(stacked)
    pieces = [[piece[0] for piece in jax.lax.split(leaf, [1] * n_layer)] for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*pieces, strict=True)]
