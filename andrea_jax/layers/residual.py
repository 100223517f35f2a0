"""The two ends of a branch: what it reads from the residual stream, and how it is added."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.layers.dropout import dropout, fold_in
from andrea_jax.layers.norm import norm
from andrea_jax.parameters import Params
from pallas_kernels.dispatch import Implementation

BRANCHES = ("attention", "mlp")


def enter_branch(
    p: Params, name: str, x_BTD: jax.Array, config: ModelConfig, kernels: Implementation, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """(x, what the branch reads): norm(x), or x itself where the norm comes after."""
    if config.norm_position == "post":
        return x_BTD, x_BTD
    return norm(p[f"{name}_norm"], x_BTD, config, kernels, mesh)


def leave_branch(
    p: Params,
    name: str,
    x_BTD: jax.Array,
    y_BTD: jax.Array,
    config: ModelConfig,
    keys: jax.Array | None,
    kernels: Implementation,
    mesh: Mesh | None,
) -> jax.Array:
    """x + y, y normed (sandwich), times its gain and multiplier, and dropped out; the sum normed in a post-norm block.

    Sandwich: Ding et al. 2021. A gain of each channel: LayerScale (Touvron et al. 2021); from 0: ReZero (Bachlechner
    et al. 2020). Post-norm: Vaswani et al. 2017.
    """
    if config.norm_position == "sandwich":
        _, y_BTD = norm(p[f"{name}_out_norm"], y_BTD, config, kernels, mesh)
    if config.branch_gain is not None:
        y_BTD = y_BTD * p[f"{name}_branch"]["gain"].astype(y_BTD.dtype)
    if config.branch_multiplier != 1:
        y_BTD = y_BTD * config.branch_multiplier
    y_BTD = dropout(y_BTD, config.dropout, fold_in(keys, BRANCHES.index(name)))
    if config.norm_position == "post":
        return norm(p[f"{name}_norm"], x_BTD, config, kernels, mesh, y_BTD)[1]
    return x_BTD + y_BTD
