"""Dropout with an explicit key."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """x with each element zeroed with probability `rate`, the others divided by 1 - rate; x itself without a key.

    `key` is one for each row of x (its first axis), or one key that `row_keys` makes them from.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.vmap(lambda row_key: jax.random.bernoulli(row_key, 1.0 - rate, x.shape[1:]))(row_keys(key, len(x)))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def row_keys(key: jax.Array | None, rows: int) -> jax.Array | None:
    """A key for each row of the batch, so that its mask does not depend on which rows a device or a part holds."""
    return key if key is None or key.ndim else fold_in(jnp.broadcast_to(key, (rows,)), jnp.arange(rows))


def fold_in(keys: jax.Array | None, numbers: jax.Array | int) -> jax.Array | None:
    """One key, or each of several, folded with its number or with the one for all; None without a key."""
    if keys is None:
        return None
    numbers = jnp.broadcast_to(numbers, keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, numbers) if keys.ndim else jax.random.fold_in(keys, numbers)
