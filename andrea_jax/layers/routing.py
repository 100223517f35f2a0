"""The router of a mixture of experts: which experts a token goes to, what they weigh, and what that says and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig

Routing = dict[str, jax.Array]


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
    """Means over the blocks, named moe_...; of load each expert's, the busiest one's, and the entropy in nats."""
    if not routing:
        return {}
    load_LE = routing["load"]
    busiest, entropy = load_LE.max(-1), jax.scipy.special.entr(load_LE).sum(-1)
    values = {name: x for name, x in routing.items() if name != "load"}
    values |= {"busiest_load": busiest, "load_entropy": entropy}
    values |= {f"load_{e}": load_L for e, load_L in enumerate(load_LE.T)}
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
