"""bias_gelu as Pallas kernels: one for each direction, over tiles of rows and columns."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bias_gelu_xla import gelu, gelu_derivative
from pallas_kernels.launch import call, lanes, load, pl, programs, store

NUM_WARPS = 4
TILE = 2048  # numbers a program holds at once: 16 for each of its 128 threads


def forward(h: Any, bias: Any, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """(u, gelu(u)). Reads h, writes u and gelu(u): 3U; without bias u is h itself: 2U."""
    F = h.shape[-1]
    h_NF = h.reshape(-1, F)
    C = columns_at_once(F)
    R = TILE // C
    like_h = jax.ShapeDtypeStruct(h_NF.shape, h.dtype)
    out_shape = (None if bias is None else like_h, like_h)
    grid = (pl.cdiv(h_NF.shape[0], R), pl.cdiv(F, C))
    run = call(functools.partial(_forward, R=R, C=C), "bias_gelu_forward", grid, out_shape, NUM_WARPS, interpret)
    u_NF, y_NF = run(h_NF, bias)
    return h if bias is None else u_NF.reshape(h.shape), y_NF.reshape(h.shape)


def _forward(h_NF: Any, bias_F: Any, u_NF: Any, y_NF: Any, *, R: int, C: int) -> None:
    N, F = h_NF.shape
    row_R = pl.program_id(0) * R + jnp.arange(R)
    column_C = pl.program_id(1) * C + jnp.arange(C)
    index = (row_R[:, None], column_C[None, :])
    mask_RC = (row_R < N)[:, None] & (column_C < F)[None, :]
    u_RC = load(h_NF, index, mask_RC)
    if bias_F is not None:
        u_RC = (u_RC + load(bias_F, column_C, column_C < F)[None, :]).astype(h_NF.dtype)
        store(u_NF, index, u_RC, mask_RC)
    store(y_NF, index, gelu(u_RC.astype(jnp.float32)), mask_RC)


def backward(u: Any, dy: Any, bias: Any, *, interpret: bool = False) -> tuple[jax.Array, jax.Array | None]:
    """(dh, dbias) as bias_gelu_xla.backward gives them, in one kernel and a small sum.

    Reads the pre-activation u and dy, writes dh: 3U. The P programs of a column tile walk every P-th tile of rows, keep
    the bias gradient in registers and store it once, each to its own row of [P, F] float32.
    """
    F = u.shape[-1]
    u_NF, dy_NF = u.reshape(-1, F), dy.reshape(-1, F)
    C = columns_at_once(F)
    R, tiles = TILE // C, pl.cdiv(F, C)
    P = programs(u_NF.shape[0], tiles)
    dbias_PF = None if bias is None else jax.ShapeDtypeStruct((P, F), jnp.float32)
    out_shape = (jax.ShapeDtypeStruct(u_NF.shape, u.dtype), dbias_PF)
    kernel = functools.partial(_backward, R=R, C=C, P=P)
    dh_NF, dbias_PF = call(kernel, "bias_gelu_backward", (P, tiles), out_shape, NUM_WARPS, interpret)(u_NF, dy_NF)
    return dh_NF.reshape(u.shape), None if bias is None else jnp.sum(dbias_PF, 0).astype(bias.dtype)


def _backward(u_NF: Any, dy_NF: Any, dh_NF: Any, dbias_PF: Any, *, R: int, C: int, P: int) -> None:
    N, F = u_NF.shape
    program = pl.program_id(0)
    column_C = pl.program_id(1) * C + jnp.arange(C)

    def tile(step: Any, dbias_RC: Any) -> Any:
        row_R = (step * P + program) * R + jnp.arange(R)
        index = (row_R[:, None], column_C[None, :])
        mask_RC = (row_R < N)[:, None] & (column_C < F)[None, :]
        dh_RC = load(dy_NF, index, mask_RC) * gelu_derivative(load(u_NF, index, mask_RC))
        store(dh_NF, index, dh_RC, mask_RC)
        return None if dbias_RC is None else dbias_RC + dh_RC

    start = None if dbias_PF is None else jnp.zeros((R, C), jnp.float32)
    dbias_RC = jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(N, R), P), tile, start)
    if dbias_PF is not None:
        store(dbias_PF, (program, column_C), jnp.sum(dbias_RC, 0), column_C < F)


def columns_at_once(F: int) -> int:
    """At most 512 columns: a divisor of every F that is a multiple of 512, so that no lane idles."""
    return min(512, lanes(F))
