"""residual_norm as Pallas kernels: one for each direction. Rows are spread over programs, a row lies in registers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.launch import call, lanes, load, pl, programs, store


def forward(x: Any, delta: Any, gain: Any, shift: Any, *, eps: float, kind: str, interpret: bool = False) -> Any:
    """(stream, normed). Reads x and delta, writes both: 4u; without delta the stream is x itself: 2u."""
    D = x.shape[-1]
    x_ND = x.reshape(-1, D)
    delta_ND = None if delta is None else delta.reshape(-1, D)
    R = rows_at_once(D)
    like_x = jax.ShapeDtypeStruct(x_ND.shape, x.dtype)
    out_shape = (None if delta is None else like_x, like_x)
    kernel = functools.partial(_forward, R=R, eps=eps, kind=kind)
    grid = (pl.cdiv(x_ND.shape[0], R),)
    run = call(kernel, "residual_norm_forward", grid, out_shape, num_warps(D), interpret)
    stream_ND, normed_ND = run(x_ND, delta_ND, gain, shift)
    return x if delta is None else stream_ND.reshape(x.shape), normed_ND.reshape(x.shape)


def _forward(
    x_ND: Any,
    delta_ND: Any,
    gain_D: Any,
    shift_D: Any,
    stream_ND: Any,
    normed_ND: Any,
    *,
    R: int,
    eps: float,
    kind: str,
) -> None:
    N, D = x_ND.shape
    column_C = jnp.arange(lanes(D))
    row_R = pl.program_id(0) * R + jnp.arange(R)
    index = (row_R[:, None], column_C[None, :])
    mask_RC = (row_R < N)[:, None] & (column_C < D)[None, :]
    stream_RC = load(x_ND, index, mask_RC)
    if delta_ND is not None:
        stream_RC = (stream_RC + load(delta_ND, index, mask_RC)).astype(x_ND.dtype)
        store(stream_ND, index, stream_RC, mask_RC)
    y_RC, _ = _normalise(stream_RC.astype(jnp.float32), mask_RC, D, eps, kind)
    if gain_D is not None:
        y_RC = y_RC * load(gain_D, column_C, column_C < D)[None, :]
    if shift_D is not None:
        y_RC = y_RC + load(shift_D, column_C, column_C < D)[None, :]
    store(normed_ND, index, y_RC, mask_RC)


def backward(
    stream: Any, dy: Any, dstream: Any, gain: Any, shift: Any, *, eps: float, kind: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(dx, dgain, dshift) as residual_norm_xla.backward gives them, in one kernel and a small sum.

    Reads the stream, dy and dstream, writes dx: 3u, or 4u with dstream. Each of the P programs walks every P-th tile
    of rows, keeps the sums for gain and shift in registers and stores them once, to its own part of [P, 2, D] float32.
    """
    D = stream.shape[-1]
    stream_ND, dy_ND = stream.reshape(-1, D), dy.reshape(-1, D)
    dstream_ND = None if dstream is None else dstream.reshape(-1, D)
    R, P = rows_at_once(D), programs(stream_ND.shape[0])
    dx_ND = jax.ShapeDtypeStruct(stream_ND.shape, stream.dtype)
    summed = [vector for vector in (gain, shift) if vector is not None]
    parts_PSD = jax.ShapeDtypeStruct((P, len(summed), D), jnp.float32) if summed else None
    out_shape = (dx_ND, parts_PSD)
    kernel = functools.partial(_backward, R=R, P=P, eps=eps, kind=kind, sums=(gain is not None, shift is not None))
    run = call(kernel, "residual_norm_backward", (P,), out_shape, num_warps(D), interpret)
    dx_ND, parts_PSD = run(stream_ND, dy_ND, dstream_ND, gain)
    sums = (jnp.sum(parts_PSD[:, which], 0) for which in range(len(summed)))
    dgain, dshift = (None if vector is None else next(sums).astype(vector.dtype) for vector in (gain, shift))
    return dx_ND.reshape(stream.shape), dgain, dshift


def _backward(
    stream_ND: Any,
    dy_ND: Any,
    dstream_ND: Any,
    gain_D: Any,
    dx_ND: Any,
    parts_PSD: Any,
    *,
    R: int,
    P: int,
    eps: float,
    kind: str,
    sums: tuple[bool, bool],
) -> None:
    N, D = stream_ND.shape
    column_C = jnp.arange(lanes(D))
    program = pl.program_id(0)
    gain_C = 1.0 if gain_D is None else load(gain_D, column_C, column_C < D)[None, :]

    def tile(step: Any, so_far: list[Any]) -> list[Any]:
        row_R = (step * P + program) * R + jnp.arange(R)
        index = (row_R[:, None], column_C[None, :])
        mask_RC = (row_R < N)[:, None] & (column_C < D)[None, :]
        unit_RC, rstd_R1 = _normalise(load(stream_ND, index, mask_RC), mask_RC, D, eps, kind)
        dy_RC = load(dy_ND, index, mask_RC)
        dunit_RC = dy_RC * gain_C
        dx_RC = dunit_RC - unit_RC * _mean(dunit_RC * unit_RC, D)
        dx_RC = (dx_RC - _mean(dunit_RC, D) if kind == "layer" else dx_RC) * rstd_R1
        if dstream_ND is not None:
            dx_RC = dx_RC + load(dstream_ND, index, mask_RC)
        store(dx_ND, index, dx_RC, mask_RC)
        terms_RC = [term for term, wanted in zip((dy_RC * unit_RC, dy_RC), sums, strict=True) if wanted]
        return [sum_RC + term_RC for sum_RC, term_RC in zip(so_far, terms_RC, strict=True)]

    start = [jnp.zeros((R, lanes(D)), jnp.float32)] * sum(sums)
    sums_RC = jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(N, R), P), tile, start)
    for which, sum_RC in enumerate(sums_RC):
        store(parts_PSD, (program, which, column_C), jnp.sum(sum_RC, 0), column_C < D)


def _normalise(s_RC: jax.Array, mask_RC: jax.Array, D: int, eps: float, kind: str) -> tuple[jax.Array, jax.Array]:
    if kind == "layer":
        s_RC = jnp.where(mask_RC, s_RC - _mean(s_RC, D), 0.0)  # the lanes outside hold minus the mean
    rstd_R1 = jax.lax.rsqrt(_mean(s_RC * s_RC, D) + eps)
    return s_RC * rstd_R1, rstd_R1


def _mean(a_RC: jax.Array, D: int) -> jax.Array:
    return jnp.sum(a_RC, 1, keepdims=True) / D


def rows_at_once(D: int) -> int:
    """Tiles of 1,024 numbers or one row: two float32 sums and four such arrays fit the registers of 4 warps."""
    return max(1, 1024 // lanes(D))


def num_warps(D: int) -> int:
    """256 numbers a warp, at least 4 and at most 16 warps."""
    return max(4, min(16, lanes(D) // 256))
