"""bias_gelu's backward pass as a Triton kernel, called through jax-triton: the mathematics of the Pallas kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import bias_gelu_xla
from pallas_kernels.bias_gelu_kernel import NUM_WARPS, TILE, columns_at_once
from pallas_kernels.launch import programs
from pallas_kernels.triton_launch import call, cdiv

SLOPE, CUBIC, FAR = (tl.constexpr(value) for value in (bias_gelu_xla.SLOPE, bias_gelu_xla.CUBIC, bias_gelu_xla.FAR))


def backward(u: Any, dy: Any, bias: Any) -> tuple[jax.Array, jax.Array | None]:
    """(dh, dbias) as bias_gelu_xla.backward gives them, in one kernel and a small sum.

    Without a bias the partial sums are one number that nothing writes.
    """
    F = u.shape[-1]
    u_NF, dy_NF = u.reshape(-1, F), dy.reshape(-1, F)
    N, C = u_NF.shape[0], columns_at_once(F)
    R, tiles = TILE // C, cdiv(F, C)
    P = programs(N, tiles)
    outputs = (
        jax.ShapeDtypeStruct((N, F), u.dtype),
        jax.ShapeDtypeStruct((1,) if bias is None else (P, F), jnp.float32),
    )
    sizes = dict(N=N, F=F, R=R, C=C, steps=cdiv(cdiv(N, R), P))
    dh_NF, dbias_PF = call(
        bias_gelu_backward, (u_NF, dy_NF), outputs, (P, tiles), NUM_WARPS, has_bias=bias is not None, **sizes
    )
    return dh_NF.reshape(u.shape), None if bias is None else jnp.sum(dbias_PF, 0).astype(bias.dtype)


@triton.jit
def bias_gelu_backward(
    u_NF,
    dy_NF,
    dh_NF,
    dbias_PF,
    N: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    steps: tl.constexpr,
    has_bias: tl.constexpr,
):
    program, P = tl.program_id(0), tl.num_programs(0)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    inside_C = column_C < F
    dbias_RC = tl.zeros((R, C), tl.float32)
    for step in range(steps):
        row_R = (step * P + program) * R + tl.arange(0, R)
        mask_RC = (row_R < N)[:, None] & inside_C[None, :]
        index_RC = (row_R.to(tl.int64) if N * F >= 2**31 else row_R)[:, None] * F + column_C[None, :]
        u_RC = tl.load(u_NF + index_RC, mask=mask_RC, other=0.0).to(tl.float32)
        dy_RC = tl.load(dy_NF + index_RC, mask=mask_RC, other=0.0).to(tl.float32)
        dh_RC = dy_RC * gelu_derivative(u_RC)
        tl.store(dh_NF + index_RC, dh_RC.to(dh_NF.dtype.element_ty), mask=mask_RC)
        if has_bias:
            dbias_RC += dh_RC
    if has_bias:
        tl.store(dbias_PF + program * F + column_C, tl.sum(dbias_RC, 0), mask=inside_C)


@triton.jit
def gelu_derivative(u):
    """As bias_gelu_xla.gelu_derivative: s + 2 u s (1 - s) z' from e = exp(-2 |z|), u clamped, NaN kept."""
    u = tl.clamp(u, -FAR, FAR, propagate_nan=tl.PropagateNan.ALL)
    z = SLOPE * u * (1 + CUBIC * u * u)
    e = tl.exp(-2 * tl.abs(z))
    larger = 1 / (1 + e)
    smaller = e * larger
    s = tl.where(u >= 0, larger, smaller)
    return s + 2 * u * (larger * smaller) * SLOPE * (1 + 3 * CUBIC * u * u)
