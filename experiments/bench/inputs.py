"""Random inputs of the benchmarked operations, and what they give in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.cases import Case
from bench.directions import direct


def draw(operation: str, case: Case, V: int, seed: int) -> tuple[jax.Array, ...]:
    """Normal numbers; for the head logits of about 1, labels in the vocabulary, and every weight 1."""
    keys = jax.random.split(jax.random.key(seed), len(case.arguments))
    arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys[:2], case.arguments[:2], strict=True)]
    if operation == "cross_entropy":
        _, head, labels, weights = case.arguments
        arrays[1] = arrays[1] * head.shape[0] ** -0.5
        return *arrays, jax.random.randint(keys[2], labels.shape, 0, V), jnp.ones(weights.shape)
    rest = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys[2:], case.arguments[2:], strict=True)]
    return *arrays, *rest


def exact(case: Case, arguments: tuple[jax.Array, ...], direction: str) -> tuple[list[jax.Array], list[Any]]:
    """(cotangents of the results in their dtypes, the direction's results from the formula in float64)."""
    formula = case.forms["autodiff"]
    like = jax.tree.leaves(jax.eval_shape(formula, *arguments))
    keys = jax.random.split(jax.random.key(99), len(like))
    dys = [
        jax.random.normal(key, x.shape, x.dtype) if x.shape else jnp.ones((), x.dtype)
        for key, x in zip(keys, like, strict=True)
    ]
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arguments]
        way = "forward" if direction == "forward" else "gradient"
        f, everything = direct(formula, tuple(wide), way, [jnp.asarray(dy, jnp.float64) for dy in dys])
        return dys, [np.asarray(x) for x in jax.tree.leaves(f(*everything))]


def nbytes(tree: Any) -> int:
    return sum(int(x.size) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
