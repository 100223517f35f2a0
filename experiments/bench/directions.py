"""One direction of an operation as a function of arrays, to compile or to time.

forward: the value. gradient: the gradients, from the operation's own arguments and the cotangents of its results.
backward: the gradients, from what the forward pass saved and the cotangents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

KEY = jax.random.key(7)


def direct(
    f: Callable[..., Any], arguments: tuple[Any, ...], direction: str, dys: list[jax.Array] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, its arguments): arrays if `arguments` are, abstract if those are. A loss's cotangent is 1.

    `dys` are the cotangents of the other results; random if None.
    """
    if direction == "forward":
        return f, arguments
    abstract = isinstance(arguments[0], jax.ShapeDtypeStruct)
    results, pullback = jax.eval_shape(partial(_vjp, f), *arguments)
    if direction == "gradient" and len(results) == 1 and results[0].shape == ():
        return lambda *a: _vjp(f, *a)[1]([jnp.ones((), results[0].dtype)]), arguments
    if dys is None:
        dys = results if abstract else [jax.random.normal(KEY, r.shape, r.dtype) for r in results]
    if direction == "gradient":
        return lambda dys, *a: _vjp(f, *a)[1](dys), (dys, *arguments)
    saved = pullback if abstract else jax.jit(lambda *a: _vjp(f, *a)[1])(*arguments)
    return lambda saved, dys: saved(dys), (saved, dys)


def _vjp(f: Callable[..., Any], *arguments: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
    """The results, and the function from their cotangents to the gradients of the floating-point arguments."""
    places = [n for n, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*values: Any) -> list[jax.Array]:
        replaced = dict(zip(places, values, strict=True))
        return jax.tree.leaves(f(*(replaced.get(n, x) for n, x in enumerate(arguments))))

    return jax.vjp(of_floats, *(arguments[n] for n in places))
