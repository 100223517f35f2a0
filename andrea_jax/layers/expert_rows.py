"""Tokens sorted by expert into blocks of rows of static shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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
