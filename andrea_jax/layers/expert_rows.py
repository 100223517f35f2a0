"""Tokens sorted by expert into blocks of rows of static shape, and the product of each block with its expert's matrix.

`jax.lax.ragged_dot` would do without blocks, but XLA expands it, on CPU (jax 0.10 to 0.12) and compiled for an H200
(jax 0.10.2), to a product with all experts: E times the work, and an E times larger copy of the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BEYOND = "beyond_an_even_share"  # the name of loops that do not run where the load is even


class Rows(NamedTuple):
    """Where choices lie. M counts choices (token by token, K each), R rows, Z blocks of rows of one expert."""

    row_M: jax.Array  # the row of a choice; R for none
    choice_R: jax.Array  # the choice in a row; M for an empty one
    expert_Z: jax.Array | None  # E for an empty block, all of which come last; None: block z is of expert z
    blocks: int
    even: int  # blocks that hold an even share of the choices, however that is spread over the experts


def place_rows(experts_BTK: jax.Array, E: int, capacity: int | None, devices: int = 1) -> Rows:
    """A row for each choice of an expert below E, in order. With a capacity each expert has B * capacity rows, of which
    a row of the batch may use `capacity`; without one as many as it needs, in blocks: enough for all choices, where an
    even share is one part of `devices`."""
    B, M = len(experts_BTK), experts_BTK.size
    expert_M = experts_BTK.reshape(M)
    if capacity is not None:
        Z = even = E
        size = B * capacity
        group_M = jnp.where(expert_M < E, expert_M * B + jnp.arange(M) // (M // B), E * B)
        starts = jnp.arange(E * B) * capacity
        expert_Z = None
    else:
        size = block_rows(M // devices, E)
        Z, even = (choices // size + min(E, choices) for choices in (M, M // devices))
        group_M = expert_M
        blocks_E = -(-_counts(expert_M, E) // size)
        ends_E = jnp.cumsum(blocks_E)
        starts = (ends_E - blocks_E) * size
        expert_Z = jnp.searchsorted(ends_E, jnp.arange(Z), side="right")
    R = Z * size
    order_M = jnp.argsort(group_M, stable=True)
    sorted_M = group_M[order_M]
    rank_M = jnp.arange(M) - jnp.searchsorted(sorted_M, sorted_M, side="left")
    sorted_row_M = jnp.where(sorted_M < len(starts), starts[jnp.minimum(sorted_M, len(starts) - 1)] + rank_M, R)
    row_M = jnp.zeros(M, jnp.int32).at[order_M].set(sorted_row_M.astype(jnp.int32), unique_indices=True)
    choice_R = jnp.full(R, M, jnp.int32).at[sorted_row_M].set(order_M.astype(jnp.int32), mode="drop")
    return Rows(row_M, choice_R, expert_Z, Z, even)


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


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def expert_product(
    x_ZRD: jax.Array, w_EDF: jax.Array, expert_Z: jax.Array | None, even: int | None = None
) -> jax.Array:
    """x w[expert] of each block, 0 of an empty one; one after the other, so that no matrix is copied for each.

    The first `even` blocks are always multiplied (None: all), later ones where they are not empty.
    """
    if expert_Z is None:
        return jnp.einsum("erd,edf->erf", x_ZRD, w_EDF)

    def add(z: Any, y_ZRF: jax.Array) -> jax.Array:
        return _put(y_ZRF, _at(x_ZRD, z) @ _at(w_EDF, expert_Z[z]), z)

    return _each_block(add, jnp.zeros((*x_ZRD.shape[:2], w_EDF.shape[2]), x_ZRD.dtype), expert_Z, len(w_EDF), even)


def _product_forward(x_ZRD: Any, w_EDF: Any, expert_Z: Any, even: Any) -> Any:
    return expert_product(x_ZRD, w_EDF, expert_Z, even), (x_ZRD, w_EDF, expert_Z)


def _product_backward(even: Any, saved: Any, dy_ZRF: Any) -> Any:
    x_ZRD, w_EDF, expert_Z = saved
    dx_ZRD = expert_product(dy_ZRF, w_EDF.swapaxes(1, 2), expert_Z, even)
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    if expert_Z is None:
        return dx_ZRD, product(x_ZRD.swapaxes(1, 2), dy_ZRF).astype(w_EDF.dtype), None

    def add(z: Any, dw_EDF: jax.Array) -> jax.Array:
        e = jnp.minimum(expert_Z[z], len(w_EDF) - 1)
        return _put(dw_EDF, _at(dw_EDF, e) + product(_at(x_ZRD, z).T, _at(dy_ZRF, z)), e)

    dw_EDF = _each_block(add, jnp.zeros(w_EDF.shape, jnp.float32), expert_Z, len(w_EDF), even)
    return dx_ZRD, dw_EDF.astype(w_EDF.dtype), None


expert_product.defvjp(_product_forward, _product_backward)


def _each_block(add: Any, start: jax.Array, expert_Z: jax.Array, E: int, even: int | None) -> jax.Array:
    """add(z, sum) for block after block. The second loop, whose count a GPU has to be asked for, seldom runs."""
    even = len(expert_Z) if even is None else even
    total = jax.lax.fori_loop(0, even, add, start)
    if even == len(expert_Z):
        return total
    with jax.named_scope(BEYOND):
        return jax.lax.fori_loop(even, jnp.maximum(even, (expert_Z < E).sum()), add, total)


def _at(x: jax.Array, z: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, z, keepdims=False)


def _put(x: jax.Array, part: jax.Array, z: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, z, 0)  # in place; .at.add would scatter
