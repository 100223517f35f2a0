"""A mixture of experts for the MLP: each token goes through the few experts that a router chooses for it.

Parameters of a block, `blocks.moe`, stacked on L as all are, with the meaning of the MLP's (x W, inputs first):
router [D, E]; w_1 [E, D, F], w_2 [E, F, D]; if gated, w_gate [E, D, F], the activated one; with mlp_bias, b_1, b_gate
[E, F], b_2 [E, D]; with balance_bias, router_bias [E]; with n_shared_expert, shared.{w_1, w_2, w_gate, b_1, ...}: one
MLP of width n_shared_expert * F. Mixtral: top 2 of 8, router softmax, router_renormalize, gated silu, no mlp_bias.

Shazeer et al. 2017; Fedus, Zoph and Shazeer 2021 (Switch); Jiang et al. 2024 (Mixtral). Z experts' blocks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.layers.expert_rows import Rows, exchange, expert_product, place_rows
from andrea_jax.layers.mlp import activated, mlp
from andrea_jax.sharding import named, several, use
from pallas_kernels.dispatch import Implementation

Routing = dict[str, jax.Array]
AXES: dict[str, tuple[str, ...]] = {
    "router": ("embed", "choice"),
    "router_bias": ("choice",),
    "w_1": ("expert", "embed", "expert_mlp"),
    "w_gate": ("expert", "embed", "expert_mlp"),
    "w_2": ("expert", "expert_mlp", "embed"),
    "b_1": ("expert", "expert_mlp"),
    "b_gate": ("expert", "expert_mlp"),
    "b_2": ("expert", "embed"),
}


def moe(
    p: Mapping[str, Any],
    x_BTD: jax.Array,
    config: ModelConfig,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Routing]:
    """(sum over a token's experts of weight * expert(x), plus shared(x); what the router did with each row).

    Over a mesh each device has its rows and its experts: it computes what its own experts give, and these are summed
    over `tensor`, as the parts of an MLP are.
    """
    names = [name for name in AXES if name in p]
    weights = {
        name: use(p[name], jnp.float32 if "router" in name else x_BTD.dtype, mesh, *AXES[name]) for name in names
    }
    axis = "tensor" if several(mesh) and mesh.shape["tensor"] > 1 else None
    local = partial(_local, config=config, implementation=implementation, axis=axis)
    if several(mesh):
        split = {name: named(mesh, *(a if a == "expert" else None for a in AXES[name])).spec for name in names}
        rows = named(mesh, "batch").spec
        local = jax.shard_map(local, mesh=mesh, in_specs=(split, rows), out_specs=(rows, rows), check_vma=False)
    y_BTD, routing = local(weights, x_BTD)
    return y_BTD + mlp(p["shared"], x_BTD, config, implementation, mesh) if "shared" in p else y_BTD, routing


def _local(
    p: Mapping[str, jax.Array], x_BTD: jax.Array, config: ModelConfig, implementation: Implementation, axis: str | None
) -> tuple[jax.Array, Routing]:
    """What the experts in `p` give; those before them are on the devices before this one on `axis`."""
    choice, routing = route(p, x_BTD, config)
    E = len(p["w_1"])
    first = jax.lax.axis_index(axis) * E if axis else 0
    mine = (choice.experts_BTK >= first) & (choice.experts_BTK < first + E)
    rows = place_rows(jnp.where(mine, choice.experts_BTK - first, E), E, capacity(config, x_BTD.shape[1]))
    y_ZRD = experts(p, dispatch(x_BTD, rows, config.expert_top_k), rows, config, implementation)
    y_BTD = combine(y_ZRD, rows, choice.weights_BTK)
    return jax.lax.psum(y_BTD, axis) if axis else y_BTD, routing


class Choice(NamedTuple):
    """A token's experts, E where one has no room for it, and their weights, float32."""

    experts_BTK: jax.Array
    weights_BTK: jax.Array


def route(p: Mapping[str, jax.Array], x_BTD: jax.Array, config: ModelConfig) -> tuple[Choice, Routing]:
    """The top experts by score, plus bias; of equal ones the first. Their scores are the weights. All in float32.

    Each row of the batch has its own: load [E], the part of its choices that each expert is; balance, E sum of load *
    mean probability (Fedus et al.); router_z, the mean of logsumexp^2 (Zoph et al. 2022); router_entropy in nats; and
    dropped, the part of its choices that found no room.
    """
    K, (E,) = config.expert_top_k, p["router"].shape[1:]
    logits_BTE = jnp.matmul(x_BTD.astype(jnp.float32), p["router"], precision=jax.lax.Precision.HIGHEST)
    softmax = config.router == "softmax"
    scores_BTE = jax.nn.softmax(logits_BTE) if softmax else jax.nn.sigmoid(logits_BTE)
    biased_BTE = scores_BTE + p["router_bias"] if "router_bias" in p else scores_BTE
    experts_BTK = jax.lax.top_k(jax.lax.stop_gradient(biased_BTE), K)[1]
    chosen_BTKE = jax.nn.one_hot(experts_BTK, E)
    weights_BTK = (chosen_BTKE * scores_BTE[:, :, None]).sum(-1)
    if config.router_renormalize:
        weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdims=True) + 1e-20)
    probabilities_BTE = scores_BTE if softmax else scores_BTE / (scores_BTE.sum(-1, keepdims=True) + 1e-20)
    load_BE, zero_B = chosen_BTKE.mean((1, 2)), jnp.zeros(len(x_BTD))
    routing = {
        "load": load_BE,
        "balance": E * (load_BE * probabilities_BTE.mean(1)).sum(-1),
        "router_z": jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)).mean(-1),
        "router_entropy": jax.lax.stop_gradient(jax.scipy.special.entr(probabilities_BTE).sum(-1).mean(-1)),
        "dropped": zero_B,
    }
    room = capacity(config, x_BTD.shape[1])
    if room is not None:  # earlier tokens go first, so that no position depends on a later one
        taken_BTKE = jnp.cumsum(chosen_BTKE.reshape(len(x_BTD), -1, E), axis=1).reshape(chosen_BTKE.shape)
        fits_BTK = (chosen_BTKE * taken_BTKE).sum(-1) <= room
        experts_BTK = jnp.where(fits_BTK, experts_BTK, E)
        routing["dropped"] = 1 - fits_BTK.mean((1, 2))
    return Choice(experts_BTK, weights_BTK), routing


def capacity(config: ModelConfig, T: int) -> int | None:
    """Choices that an expert takes of a row of T tokens; None: all."""
    if config.capacity_factor is None or config.n_expert is None:
        return None
    share = config.expert_top_k * T / config.n_expert
    return min(T, math.ceil(config.capacity_factor * share - 1e-9))


def dispatch(x_BTD: jax.Array, rows: Rows, K: int) -> jax.Array:
    """[Z, R, D]: each choice's token in its row."""
    repeated_MD = jnp.repeat(x_BTD.reshape(-1, x_BTD.shape[-1]), K, axis=0)
    return exchange(repeated_MD, rows.choice_R, rows.row_M).reshape(rows.blocks, -1, x_BTD.shape[-1])


def experts(
    p: Mapping[str, jax.Array], x_ZRD: jax.Array, rows: Rows, config: ModelConfig, implementation: Implementation
) -> jax.Array:
    """Each block of rows through its expert: the MLP's formulas."""

    def product(x: jax.Array, weight: str, bias: str) -> jax.Array:
        y = expert_product(x, p[weight], rows.expert_Z)
        if bias not in p:
            return y
        if rows.expert_Z is None:
            return y + p[bias][:, None]
        # as a product: a gather's gradient would add in no fixed order
        return y + (jax.nn.one_hot(rows.expert_Z, len(p[bias]), dtype=y.dtype) @ p[bias])[:, None]

    gate_ZRF = product(x_ZRD, "w_gate", "b_gate") if config.gated else None
    return product(activated(product(x_ZRD, "w_1", "b_1"), gate_ZRF, config, implementation), "w_2", "b_2")


def combine(y_ZRD: jax.Array, rows: Rows, weights_BTK: jax.Array) -> jax.Array:
    """[B, T, D]: the weighted sum of what a token's experts gave; 0 for a choice that has no row."""
    y_BTKD = exchange(y_ZRD.reshape(-1, y_ZRD.shape[-1]), rows.row_M, rows.choice_R)
    y_BTKD = y_BTKD.reshape(*weights_BTK.shape, -1)
    return jnp.einsum("btkd,btk->btd", y_BTKD, weights_BTK.astype(y_BTKD.dtype))


def routing_loss(routing: Routing, config: ModelConfig) -> jax.Array:
    """The losses of all routers: balance, so that no expert stands idle, and z, so that logits stay small."""
    balance, z = routing["balance"].sum(), routing["router_z"].sum()
    return config.balance_weight * balance + config.router_z_weight * z


def no_routing(config: ModelConfig) -> Routing:
    """What sums over parts of a batch start from."""
    if config.n_expert is None:
        return {}
    names = ("balance", "router_z", "router_entropy", "dropped")
    return {name: jnp.zeros(config.n_layer) for name in names} | {"load": jnp.zeros((config.n_layer, config.n_expert))}


def routing_metrics(routing: Routing) -> Routing:
    """Means over the blocks, named moe_...; of load, the part that the busiest expert has, and the entropy in nats."""
    if not routing:
        return {}
    load_LE = routing["load"]
    busiest, entropy = load_LE.max(-1), jax.scipy.special.entr(load_LE).sum(-1)
    values = {name: x for name, x in routing.items() if name != "load"}
    values |= {"busiest_load": busiest, "load_entropy": entropy}
    return {f"moe_{name}": x.mean() for name, x in values.items()}


def move_router_bias(params: Mapping[str, Any], routing: Routing, config: ModelConfig) -> Any:
    """Each expert's bias up by `balance_bias` if its load is below the mean, down if above (Wang et al. 2024).

    No gradient and no decay moves it, so that the optimizer leaves it as it is.
    """
    if config.balance_bias is None:
        return params
    load_LE, blocks = routing["load"], params["blocks"]
    step_LE = config.balance_bias * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
    experts = blocks["moe"] | {"router_bias": blocks["moe"]["router_bias"] + step_LE}
    return {**params, "blocks": {**blocks, "moe": experts}}
