"""residual_norm's backward pass as a Triton kernel, called through jax-triton: the mathematics of the Pallas kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.launch import lanes, programs
from pallas_kernels.residual_norm_kernel import num_warps, rows_at_once
from pallas_kernels.triton_launch import call, cdiv


def backward(
    stream: Any, dy: Any, dstream: Any, gain: Any, shift: Any, *, eps: float, kind: str
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(dx, dgain, dshift) as residual_norm_xla.backward gives them, in one kernel and a small sum.

    What is absent is passed as the stream and never read; without gain and shift the partial sums are one number that
    nothing writes.
    """
    D = stream.shape[-1]
    stream_ND, dy_ND = stream.reshape(-1, D), dy.reshape(-1, D)
    dstream_ND = stream_ND if dstream is None else dstream.reshape(-1, D)
    N, R = stream_ND.shape[0], rows_at_once(D)
    P, S = programs(N), sum(vector is not None for vector in (gain, shift))
    outputs = (
        jax.ShapeDtypeStruct((N, D), stream.dtype),
        jax.ShapeDtypeStruct((P, S, D) if S else (1,), jnp.float32),
    )
    sizes = dict(N=N, D=D, R=R, C=lanes(D), S=S, steps=cdiv(cdiv(N, R), P))
    given = dict(has_dstream=dstream is not None, has_gain=gain is not None, has_shift=shift is not None)
    arguments = (stream_ND, dy_ND, dstream_ND, stream_ND if gain is None else gain)
    dx_ND, parts_PSD = call(
        residual_norm_backward, arguments, outputs, (P,), num_warps(D), eps=eps, layer=kind == "layer", **sizes, **given
    )
    sums = (jnp.sum(parts_PSD[:, which], 0) for which in range(S))
    dgain, dshift = (None if vector is None else next(sums).astype(vector.dtype) for vector in (gain, shift))
    return dx_ND.reshape(stream.shape), dgain, dshift


@triton.jit
def residual_norm_backward(
    stream_ND,
    dy_ND,
    dstream_ND,
    gain_D,
    dx_ND,
    parts_PSD,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    steps: tl.constexpr,
    eps: tl.constexpr,
    layer: tl.constexpr,
    has_dstream: tl.constexpr,
    has_gain: tl.constexpr,
    has_shift: tl.constexpr,
):
    program, P = tl.program_id(0), tl.num_programs(0)
    column_C = tl.arange(0, C)
    inside_C = column_C < D
    if has_gain:
        gain_C = tl.load(gain_D + column_C, mask=inside_C, other=0.0).to(tl.float32)
    dgain_RC = tl.zeros((R, C), tl.float32)
    dshift_RC = tl.zeros((R, C), tl.float32)
    for step in range(steps):
        row_R = (step * P + program) * R + tl.arange(0, R)
        mask_RC = (row_R < N)[:, None] & inside_C[None, :]
        index_RC = (row_R.to(tl.int64) if N * D >= 2**31 else row_R)[:, None] * D + column_C[None, :]
        s_RC = tl.load(stream_ND + index_RC, mask=mask_RC, other=0.0).to(tl.float32)
        dy_RC = tl.load(dy_ND + index_RC, mask=mask_RC, other=0.0).to(tl.float32)
        if layer:
            mean_R1 = tl.sum(s_RC, 1, keep_dims=True) / D
            s_RC = tl.where(mask_RC, s_RC - mean_R1, 0.0)  # the lanes outside hold minus the mean
        rstd_R1 = tl.rsqrt(tl.sum(s_RC * s_RC, 1, keep_dims=True) / D + eps)
        unit_RC = s_RC * rstd_R1
        dunit_RC = dy_RC * gain_C[None, :] if has_gain else dy_RC
        dx_RC = dunit_RC - unit_RC * (tl.sum(dunit_RC * unit_RC, 1, keep_dims=True) / D)
        if layer:
            dx_RC = dx_RC - tl.sum(dunit_RC, 1, keep_dims=True) / D
        dx_RC = dx_RC * rstd_R1
        if has_dstream:
            dx_RC = dx_RC + tl.load(dstream_ND + index_RC, mask=mask_RC, other=0.0).to(tl.float32)
        tl.store(dx_ND + index_RC, dx_RC.to(dx_ND.dtype.element_ty), mask=mask_RC)
        if has_gain:
            dgain_RC += dy_RC * unit_RC
        if has_shift:
            dshift_RC += dy_RC
    part_C = parts_PSD + program * S * D + column_C
    if has_gain:
        tl.store(part_C, tl.sum(dgain_RC, 0), mask=inside_C)
    if has_shift:
        tl.store(part_C + (S - 1) * D, tl.sum(dshift_RC, 0), mask=inside_C)
