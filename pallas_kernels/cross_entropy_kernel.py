"""One program a row: logsumexp, the label's logit and the gradient of a row of logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.launch import lanes, pl, pltriton, store

TILE = 8192  # columns at a time
HELD = 2 * TILE  # a row of at most so many columns stays in registers between the two passes
LOWEST = float(jnp.finfo(jnp.float32).min)


def losses_and_gradient(
    logits_RV: jax.Array,
    labels_R: jax.Array,
    weights_R: jax.Array,
    *,
    vocab_size: int,
    z_loss: float,
    dtype: Any,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See pallas_kernels.cross_entropy. The gradient takes the place of the logits where it has their dtype."""
    R, V = logits_RV.shape
    tiles = V // TILE if V > HELD else 0
    pieces = split(tiles * TILE, V)

    def kernel(
        logits_ref: Any, label_ref: Any, weight_ref: Any, logsum_ref: Any, nll_ref: Any, dlogits_ref: Any
    ) -> None:
        row = pl.program_id(0)
        label, weight = jnp.clip(label_ref[row], 0, vocab_size - 1), weight_ref[row]

        def load(start: Any, size: int) -> tuple[jax.Array, jax.Array]:
            columns = start + jnp.arange(size)
            x = pltriton.load(logits_ref.at[row, columns], mask=columns < V, other=0.0)
            return jnp.where(columns < vocab_size, x.astype(jnp.float32), -jnp.inf), columns

        def look(tile: Any, seen: Any) -> Any:
            x, columns = load(tile * TILE, TILE)
            return add_tile(seen, x, columns == label)

        def write(x: jax.Array, columns: jax.Array) -> None:
            gradient = scale * jnp.exp(x - top) - jnp.where(columns == label, weight, 0.0)
            store(dlogits_ref, (row, columns), jnp.where(weight == 0, 0.0, gradient), columns < V)

        def write_tile(tile: Any, _: Any) -> None:
            write(*load(tile * TILE, TILE))

        held = [load(start, size) for start, size in pieces]
        empty = (jnp.full(TILE, LOWEST), jnp.zeros(TILE), jnp.zeros(TILE))
        largest, total, label_logit = jax.lax.fori_loop(0, tiles, look, empty) if tiles else (LOWEST, 0.0, 0.0)
        top = jnp.max(largest)
        for x, _ in held:
            top = jnp.maximum(top, jnp.max(x))
        total, label_logit = jnp.sum(total * jnp.exp(largest - top)), jnp.sum(label_logit)
        for x, columns in held:
            total += jnp.sum(jnp.exp(x - top))
            label_logit += jnp.sum(jnp.where(columns == label, x, 0.0))
        logsum = top + jnp.log(total)
        scale = weight * (1 + 2 * z_loss * logsum) / total
        logsum_ref[row] = logsum
        nll_ref[row] = top - label_logit + jnp.log(total)
        for x, columns in held:
            write(x, columns)
        if tiles:
            jax.lax.fori_loop(0, tiles, write_tile, None)

    rows = jax.ShapeDtypeStruct((R,), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=(rows, rows, jax.ShapeDtypeStruct((R, V), dtype)),
        grid=(R,),
        name="cross_entropy",
        interpret=interpret,
        input_output_aliases={0: 2} if dtype == logits_RV.dtype else {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps(V), num_stages=1),
    )(logits_RV, labels_R.astype(jnp.int32), weights_R.astype(jnp.float32))


def add_tile(seen: Any, x: Any, hit: Any) -> tuple[Any, Any, Any]:
    """Each lane's largest value, its sum of exp(value - largest), and the label's logit, with one tile more."""
    largest, total, label_logit = seen
    scale = jnp.exp(-jnp.abs(x - largest))
    total = jnp.where(x > largest, total * scale + 1, total + scale)
    return jnp.maximum(largest, x), total, label_logit + jnp.where(hit, x, 0.0)


def split(start: int, stop: int) -> list[tuple[int, int]]:
    """(start, size) of at most two pieces with sizes that are powers of two; the last may reach past `stop`."""
    if start == stop:
        return []
    size = 1 << ((stop - start).bit_length() - 1)
    rest = stop - start - size
    return [(start, size)] + ([(start + size, lanes(rest))] if rest else [])


def num_warps(V: int) -> int:
    """At most 32 (then two rows of the widest vocabularies are under way on a core, and stay in its cache)."""
    return 32 if V > HELD else min(max(lanes(V) // 1024, 1), 16)
