"""A mixture of experts for the MLP: each token goes through the few experts that a router chooses for it.

Parameters of a block, `blocks.moe`, stacked on L as all are, with the meaning of the MLP's (x W, inputs first):
router [D, E]; w_1 [E, D, F], w_2 [E, F, D]; if gated, w_gate [E, D, F], the activated one; with mlp_bias, b_1, b_gate
[E, F], b_2 [E, D]; with balance_bias, router_bias [E]; with n_shared_expert, shared.{w_1, w_2, w_gate, b_1, ...}: one
MLP of width n_shared_expert * F. Mixtral: top 2 of 8, router softmax, router_renormalize, gated silu, no mlp_bias.

Shazeer et al. 2017; Fedus, Zoph and Shazeer 2021 (Switch); Jiang et al. 2024 (Mixtral). Z experts' blocks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from andrea_jax.config import ModelConfig
from andrea_jax.layers.expert_product import expert_product
from andrea_jax.layers.expert_rows import Rows, exchange, place_rows
from andrea_jax.layers.mlp import activated, mlp
from andrea_jax.layers.routing import Choice, Routing, capacity, route
from andrea_jax.sharding import constrain, gathered_here, named, several, spec_sharding
from pallas_kernels.dispatch import Implementation

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
SHARED = {
    name: tuple("mlp" if axis == "expert_mlp" else axis for axis in axes if axis != "expert")
    for name, axes in AXES.items()
    if "router" not in name
}


def moe(
    p: Mapping[str, Any],
    x_BTD: jax.Array,
    config: ModelConfig,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Routing]:
    """(sum over a token's experts of weight * expert(x), plus shared(x); what the router did with each row).

    Over a mesh each device has its rows, its experts of those over `expert`, and of each its share of the width, as of
    an MLP's: what experts and the shared one give is added over `tensor` at once.
    """
    p = jax.tree.map_with_path(lambda path, w: w.astype(jnp.float32 if "router" in str(path) else x_BTD.dtype), p)
    if not several(mesh):
        return _local(p, x_BTD, config, implementation)
    specs = jax.tree.map(lambda _, axes: spec_sharding(mesh, axes).spec, p, _axes(p))
    rows = named(mesh, "batch").spec

    def local(p: Mapping[str, Any], x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
        y_BTD, routing = _local(_usable(p, specs), x_BTD, config, implementation, mesh.shape["expert"])
        return y_BTD[None], routing

    # Added outside: shard_map cannot know that a sum inside is the same on all devices, and would add its gradient too.
    parts, routing = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, rows), out_specs=(PartitionSpec("tensor", *rows), rows), check_vma=False
    )(p, x_BTD)
    return constrain(jax.lax.reduce_sum(parts, (0,)), mesh, "batch", None, None), routing


def _axes(p: Mapping[str, Any]) -> dict[str, Any]:
    """The logical axes of each tensor in p."""
    axes: dict[str, Any] = {name: AXES[name] for name in p if name != "shared"}
    return axes | ({"shared": {name: SHARED[name] for name in p["shared"]}} if "shared" in p else {})


def _usable(p: Mapping[str, Any], specs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inside shard_map: whole over `fsdp`; of the parts that are added over `tensor` one has the output's bias."""
    p = jax.tree.map(gathered_here, p, specs)
    if jax.lax.axis_size("tensor") == 1:
        return p
    first = jax.lax.axis_index("tensor") == 0
    return jax.tree.map_with_path(lambda path, w: jnp.where(first, w, 0) if "b_2" in str(path) else w, p)


def _local(
    p: Mapping[str, Any], x_BTD: jax.Array, config: ModelConfig, implementation: Implementation, devices: int = 1
) -> tuple[jax.Array, Routing]:
    """`moe` of a device's rows, by all experts of the `devices` along `expert`, of which it has those in p."""
    choice, routing = route(p, x_BTD, config)
    through = _through_places if config.capacity_factor else _through_blocks
    y_BTD = through(p, x_BTD, choice, config, implementation, devices)
    return y_BTD + mlp(p["shared"], x_BTD, config, implementation) if "shared" in p else y_BTD, routing


def _through_places(
    p: Mapping[str, Any],
    x_BTD: jax.Array,
    choice: Choice,
    config: ModelConfig,
    implementation: Implementation,
    devices: int,
) -> jax.Array:
    """With a capacity: each device sends each expert as many places, full or not, and has them back."""
    rows = place_rows(choice.experts_BTK, len(p["w_1"]) * devices, capacity(config, x_BTD.shape[1]))
    x_ERD = dispatch(x_BTD, rows, config.expert_top_k)
    if devices > 1:
        x_ERD = jax.lax.all_to_all(x_ERD, "expert", split_axis=0, concat_axis=1, tiled=True)
    y_ERD = experts(p, x_ERD, rows, config, implementation)
    if devices > 1:
        y_ERD = jax.lax.all_to_all(y_ERD, "expert", split_axis=1, concat_axis=0, tiled=True)
    return combine(y_ERD, rows, choice.weights_BTK)


def _through_blocks(
    p: Mapping[str, Any],
    x_BTD: jax.Array,
    choice: Choice,
    config: ModelConfig,
    implementation: Implementation,
    devices: int,
) -> jax.Array:
    """Without one: each device sees all tokens of those along `expert`, and its experts' part of them is added.

    Memory is for the case that all choose its experts; arithmetic is for those that do. `jax.lax.ragged_all_to_all`
    would send the chosen alone, but XLA has none for CPU (jax 0.10 to 0.12), and its memory is the same.
    """
    experts_BTK, E = choice.experts_BTK, len(p["w_1"])
    if devices > 1:
        gather = partial(jax.lax.all_gather, axis_name="expert", tiled=True)
        x_BTD, choice = gather(x_BTD), jax.tree.map(gather, choice)
        experts_BTK = choice.experts_BTK - jax.lax.axis_index("expert") * E
        experts_BTK = jnp.where((experts_BTK >= 0) & (experts_BTK < E), experts_BTK, E)
    rows = place_rows(experts_BTK, E, None, devices)
    y_ZRD = experts(p, dispatch(x_BTD, rows, config.expert_top_k), rows, config, implementation)
    y_BTD = combine(y_ZRD, rows, choice.weights_BTK)
    return jax.lax.psum_scatter(y_BTD, "expert", tiled=True) if devices > 1 else y_BTD


def dispatch(x_BTD: jax.Array, rows: Rows, K: int) -> jax.Array:
    """[Z, R, D]: each choice's token in its row."""
    repeated_MD = jnp.repeat(x_BTD.reshape(-1, x_BTD.shape[-1]), K, axis=0)
    return exchange(repeated_MD, rows.choice_R, rows.row_M).reshape(rows.blocks, -1, x_BTD.shape[-1])


def experts(
    p: Mapping[str, jax.Array], x_ZRD: jax.Array, rows: Rows, config: ModelConfig, implementation: Implementation
) -> jax.Array:
    """Each block of rows through its expert: the MLP's formulas."""

    def product(x: jax.Array, weight: str, bias: str) -> jax.Array:
        y = expert_product(x, p[weight], rows.expert_Z, rows.even)
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
