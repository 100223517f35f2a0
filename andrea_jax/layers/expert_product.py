"""The product of each block of rows with its expert's matrix.

`jax.lax.ragged_dot` would do without blocks, but XLA expands it, on CPU (jax 0.10 to 0.12) and compiled for an H200
(jax 0.10.2), to a product with all experts: E times the work, and an E times larger copy of the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

BEYOND = "beyond_an_even_share"  # the name of loops that do not run where the load is even


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def expert_product(
    x_ZRD: jax.Array, w_EDF: jax.Array, expert_Z: jax.Array | None, even: int | None = None
) -> jax.Array:
    """x w[expert] of each block, 0 of an empty one.

    The first `even` blocks are always multiplied (None: all), later ones where they are not empty. On a CPU one after
    the other, so that no matrix is copied for each. On a GPU at once: of 40 blocks of 512 rows and 8 experts of 768 x
    768 that is 3 kernels and 167 MB instead of 200 and 802, forward, and 6 and 428 instead of 500 and 1,623 backward
    (compiled for an H200).
    """
    if expert_Z is None:
        return jnp.einsum("erd,edf->erf", x_ZRD, w_EDF)
    even = len(expert_Z) if even is None else even
    y_ZRF = _even(one_by_one, at_once, even, x_ZRD, w_EDF, expert_Z)
    return _beyond(partial(_add_product, x_ZRD, w_EDF, expert_Z), y_ZRF, even, expert_Z, len(w_EDF))


def _product_forward(x_ZRD: Any, w_EDF: Any, expert_Z: Any, even: Any) -> Any:
    return expert_product(x_ZRD, w_EDF, expert_Z, even), (x_ZRD, w_EDF, expert_Z)


def _product_backward(even: Any, saved: Any, dy_ZRF: Any) -> Any:
    x_ZRD, w_EDF, expert_Z = saved
    dx_ZRD = expert_product(dy_ZRF, w_EDF.swapaxes(1, 2), expert_Z, even)
    if expert_Z is None:
        return dx_ZRD, _float32_product("erd,erf->edf", x_ZRD, dy_ZRF).astype(w_EDF.dtype), None
    even, E = len(expert_Z) if even is None else even, len(w_EDF)
    dw_EDF = _even(partial(_gradient_one_by_one, E), partial(_gradient_at_once, E), even, x_ZRD, dy_ZRF, expert_Z)
    dw_EDF = _beyond(partial(_add_gradient, x_ZRD, dy_ZRF, expert_Z), dw_EDF, even, expert_Z, E)
    return dx_ZRD, dw_EDF.astype(w_EDF.dtype), None


expert_product.defvjp(_product_forward, _product_backward)
_float32_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _even(on_cpu: Any, elsewhere: Any, even: int, *arrays: jax.Array) -> jax.Array:
    """What the first blocks give."""
    return jax.lax.platform_dependent(*arrays, cpu=partial(on_cpu, even), default=partial(elsewhere, even))


def one_by_one(even: int, x_ZRD: jax.Array, w_EDF: jax.Array, expert_Z: jax.Array) -> jax.Array:
    """The products of the first `even` blocks, 0 of the others."""
    start = jnp.zeros((*x_ZRD.shape[:2], w_EDF.shape[2]), x_ZRD.dtype)
    return jax.lax.fori_loop(0, even, partial(_add_product, x_ZRD, w_EDF, expert_Z), start)


def at_once(even: int, x_ZRD: jax.Array, w_EDF: jax.Array, expert_Z: jax.Array) -> jax.Array:
    """The same, each block with a copy of its expert's matrix."""
    w_ZDF = w_EDF.at[expert_Z[:even]].get(mode="fill", fill_value=0)
    y_ZRF = jnp.einsum("zrd,zdf->zrf", x_ZRD[:even], w_ZDF)
    return jnp.pad(y_ZRF, ((0, len(x_ZRD) - even), (0, 0), (0, 0)))


def _gradient_one_by_one(E: int, even: int, x_ZRD: jax.Array, dy_ZRF: jax.Array, expert_Z: jax.Array) -> jax.Array:
    start = jnp.zeros((E, x_ZRD.shape[2], dy_ZRF.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, even, partial(_add_gradient, x_ZRD, dy_ZRF, expert_Z), start)


def _gradient_at_once(E: int, even: int, x_ZRD: jax.Array, dy_ZRF: jax.Array, expert_Z: jax.Array) -> jax.Array:
    dw_ZDF = _float32_product("zrd,zrf->zdf", x_ZRD[:even], dy_ZRF[:even])
    chosen_ZE = jax.nn.one_hot(expert_Z[:even], E)  # as a product: a scatter would add in no fixed order
    return _float32_product("ze,zdf->edf", chosen_ZE, dw_ZDF, precision=jax.lax.Precision.HIGHEST)


def _beyond(add: Any, total: jax.Array, even: int, expert_Z: jax.Array, E: int) -> jax.Array:
    """add(z, total) for the blocks from `even` on. The loop, whose count a GPU has to be asked for, seldom runs."""
    if even == len(expert_Z):
        return total
    with jax.named_scope(BEYOND):
        return jax.lax.fori_loop(even, jnp.maximum(even, (expert_Z < E).sum()), add, total)


def _add_product(x_ZRD: Any, w_EDF: Any, expert_Z: Any, z: Any, y_ZRF: jax.Array) -> jax.Array:
    return _put(y_ZRF, _at(x_ZRD, z) @ _at(w_EDF, expert_Z[z]), z)


def _add_gradient(x_ZRD: Any, dy_ZRF: Any, expert_Z: Any, z: Any, dw_EDF: jax.Array) -> jax.Array:
    e = jnp.minimum(expert_Z[z], len(dw_EDF) - 1)
    return _put(dw_EDF, _at(dw_EDF, e) + _float32_product("rd,rf->df", _at(x_ZRD, z), _at(dy_ZRF, z)), e)


def _at(x: jax.Array, z: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, z, keepdims=False)


def _put(x: jax.Array, part: jax.Array, z: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, z, 0)  # in place; .at.add would scatter
