"""Rows of a table by number, also where the table's rows and the numbers are split over devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from andrea_jax.sharding import ROWS, add_parts, several

TABLE = PartitionSpec("tensor", None)
BATCH = PartitionSpec(ROWS)


def embedding(table_VD: jax.Array, tokens_BT: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """table[tokens] [B, T, D]. Over a mesh each device looks its own tokens up in its part of the vocabulary.

    jit by itself would exchange the gradients of activations. The gradient is added over the batch's devices once.
    """
    return _embedding(table_VD, tokens_BT, mesh) if several(mesh) else table_VD[tokens_BT]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embedding(table_VD: jax.Array, tokens_BT: jax.Array, mesh: Mesh) -> jax.Array:
    def local(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        rows_BTD = table_VD.at[_here(tokens_BT, len(table_VD))].get(mode="fill", fill_value=0)
        one_part = mesh.shape["tensor"] == 1
        return rows_BTD if one_part else jax.lax.psum(rows_BTD, "tensor")  # one is the row, the others are zeros

    return jax.shard_map(local, mesh=mesh, in_specs=(TABLE, BATCH), out_specs=BATCH, check_vma=False)(
        table_VD, tokens_BT
    )


def _forward(table_VD: jax.Array, tokens_BT: jax.Array, mesh: Mesh) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _embedding(table_VD, tokens_BT, mesh), (table_VD, tokens_BT)


def _backward(mesh: Mesh, saved: tuple[jax.Array, jax.Array], dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    def local(table_VD: jax.Array, tokens_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
        return jnp.zeros_like(table_VD).at[_here(tokens_BT, len(table_VD))].add(dx_BTD, mode="drop")[None]

    out = PartitionSpec(ROWS, *TABLE)
    parts = jax.shard_map(local, mesh=mesh, in_specs=(TABLE, BATCH, BATCH), out_specs=out, check_vma=False)
    return add_parts(parts(*saved, dx_BTD), mesh, "vocab", "embed"), None


_embedding.defvjp(_forward, _backward)


def _here(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Row numbers within this device's part of the table; what lies outside is out of its bounds, on either side."""
    local_BT = tokens_BT - jax.lax.axis_index("tensor") * rows
    return jnp.where(local_BT < 0, rows, local_BT)
