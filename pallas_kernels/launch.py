"""What the kernels share: the guarded import of Pallas' Triton back end, tiles, and the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # deprecated since jax 0.11; without it everything runs in its XLA form
    pl = pltriton = None  # type: ignore[assignment]


def lanes(width: int) -> int:
    """The power of two that a tile of `width` columns takes; what lies outside is masked."""
    return 1 << max(width - 1, 0).bit_length()


def programs(rows: int, tiles: int = 1) -> int:
    """How many programs share `rows` rows, from sizes alone so that results do not depend on the card.

    Each stores float32 partials, which are read once more: with 80 rows a program and two sums, 0.1 of a 16-bit array.
    At most 792 = 6 x 132 in all, `tiles` columns of them, fill the largest card that is compiled for; at least 132.
    """
    return max(1, min(rows, max(132 // tiles, min(rows // 80, 792 // tiles))))


def load(ref: Any, index: Any, mask: jax.Array) -> jax.Array:
    """float32 of what is inside the mask, 0 outside: lanes that nothing defines must not reach a sum."""
    return pltriton.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)


def store(ref: Any, index: Any, value: jax.Array, mask: jax.Array) -> None:
    pltriton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def call(
    kernel: Callable[..., None], name: str, grid: tuple[int, ...], out_shape: Any, num_warps: int, interpret: bool
) -> Callable[..., Any]:
    """`kernel` over `grid`; arguments and results are trees of whole arrays, None where one is absent."""
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        name=name,
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
    )


@functools.cache
def refusal() -> str | None:
    """Why this process's GPU takes no Pallas kernel, found by lowering a small one; None: it does."""

    def copy(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...]

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    try:
        jax.jit(call(copy, "probe", (1,), x, 4, interpret=False)).lower(x)
    except Exception as error:  # jax raises several kinds, one of them for cards that its table lacks
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
