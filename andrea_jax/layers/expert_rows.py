"""Tokens sorted by expert into blocks of rows of static shape, and the product of each block with its expert's matrix.

`jax.lax.ragged_dot` would do without blocks, but XLA expands it, on CPU (jax 0.10 to 0.12) and compiled for an H200
(jax 0.10.2), to a product with all experts: E times the work, and an E times larger copy of the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Where choices lie. M counts choices (token by token, K each), R rows, Z blocks of rows of one expert."""

    row_M: jax.Array  # the row of a choice; R for none
    choice_R: jax.Array  # the choice in a row; M for an empty one
    expert_Z: jax.Array | None  # None: block z is of expert z
    blocks: int


def place_rows(experts_BTK: jax.Array, E: int, capacity: int | None) -> Rows:
    """A row for each choice of an expert below E, in order. With a capacity each expert has B * capacity rows, of which
    a row of the batch may use `capacity`; without one as many as it needs, in blocks."""
    B, M = len(experts_BTK), experts_BTK.size
    expert_M = experts_BTK.reshape(M)
    if capacity is not None:
        Z, size = E, B * capacity
        group_M = jnp.where(expert_M < E, expert_M * B + jnp.arange(M) // (M // B), E * B)
        starts = jnp.arange(E * B) * capacity
        expert_Z = None
    else:
        size = block_rows(M, E)
        Z = M // size + min(E, M)
        group_M = expert_M
        blocks_E = -(-_counts(expert_M, E) // size)
        ends_E = jnp.cumsum(blocks_E)
        starts = (ends_E - blocks_E) * size
        expert_Z = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(Z), side="right"), E - 1)
    R = Z * size
    order_M = jnp.argsort(group_M, stable=True)
    sorted_M = group_M[order_M]
    rank_M = jnp.arange(M) - jnp.searchsorted(sorted_M, sorted_M, side="left")
    sorted_row_M = jnp.where(sorted_M < len(starts), starts[jnp.minimum(sorted_M, len(starts) - 1)] + rank_M, R)
    row_M = jnp.zeros(M, jnp.int32).at[order_M].set(sorted_row_M.astype(jnp.int32), unique_indices=True)
    choice_R = jnp.full(R, M, jnp.int32).at[sorted_row_M].set(order_M.astype(jnp.int32), mode="drop")
    return Rows(row_M, choice_R, expert_Z, Z)


def _counts(expert_M: jax.Array, E: int) -> jax.Array:
    return (expert_M[:, None] == jnp.arange(E)).sum(0)


def block_rows(choices: int, E: int) -> int:
    """Rows of a block: a quarter of an expert's even share, so that about an eighth of them stay empty."""
    return min(1024, max(8, 1 << (max(1, choices // (4 * E)) - 1).bit_length()))


@jax.custom_vjp
def exchange(x_MD: jax.Array, source_R: jax.Array, target_M: jax.Array) -> jax.Array:
    """x[source], 0 where that is beyond x. `target` says where each row of x goes, so that backward gathers too."""
    return x_MD.at[source_R].get(mode="fill", fill_value=0)


def _exchange_forward(x_MD: Any, source_R: Any, target_M: Any) -> Any:
    return exchange(x_MD, source_R, target_M), (source_R, target_M)


def _exchange_backward(indices: Any, dy_RD: Any) -> Any:
    source_R, target_M = indices
    return exchange(dy_RD, target_M, source_R), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)


@jax.custom_vjp
def expert_product(x_ZRD: jax.Array, w_EDF: jax.Array, expert_Z: jax.Array | None) -> jax.Array:
    """x w[expert] of each block; one block after the other, so that no matrix is copied for each."""
    if expert_Z is None:
        return jnp.einsum("erd,edf->erf", x_ZRD, w_EDF)
    return jax.lax.map(lambda x_e: x_e[0] @ w_EDF[x_e[1]], (x_ZRD, expert_Z))


def _product_forward(x_ZRD: Any, w_EDF: Any, expert_Z: Any) -> Any:
    return expert_product(x_ZRD, w_EDF, expert_Z), (x_ZRD, w_EDF, expert_Z)


def _product_backward(saved: Any, dy_ZRF: Any) -> Any:
    x_ZRD, w_EDF, expert_Z = saved
    dx_ZRD = expert_product(dy_ZRF, w_EDF.swapaxes(1, 2), expert_Z)
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    if expert_Z is None:
        return dx_ZRD, product(x_ZRD.swapaxes(1, 2), dy_ZRF).astype(w_EDF.dtype), None

    def add(dw_EDF: jax.Array, block: Any) -> tuple[jax.Array, None]:
        x_RD, dy_RF, expert = block
        dw_DF = dw_EDF[expert] + product(x_RD.T, dy_RF)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, expert, 0), None  # in place; .at.add would scatter

    dw_EDF, _ = jax.lax.scan(add, jnp.zeros(w_EDF.shape, jnp.float32), (x_ZRD, dy_ZRF, expert_Z))
    return dx_ZRD, dw_EDF.astype(w_EDF.dtype), None


expert_product.defvjp(_product_forward, _product_backward)
