"""Residual addition and normalisation in one operation, with its gradient."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels import dispatch, residual_norm_kernel, residual_norm_xla
from pallas_kernels.dispatch import Implementation, Plan

Kind = Literal["layer", "rms"]
KINDS = ("layer", "rms")


def residual_norm(
    x: jax.Array,
    delta: jax.Array | None,
    gain: jax.Array | None,
    shift: jax.Array | None,
    eps: float,
    kind: Kind = "layer",
    implementation: Implementation = "auto",
    sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(stream, normed), both [..., D] in x's dtype: stream = x + delta, normed = norm(stream) over D.

    layer: normed = gain * (s - mean(s)) / sqrt(var(s) + eps) + shift        (Ba, Kiros and Hinton 2016)
    rms:   normed = gain * s / sqrt(mean(s^2) + eps) + shift                  (Zhang and Sennrich 2019)

    `delta` [..., D] has x's shape and dtype; without it the stream is x. `gain` and `shift` [D] may be absent and of
    another dtype, which their gradients have. Statistics are float32; backward saves the stream and recomputes them.
    In units of u, one [..., D] array: forward 2u, with delta 4u; backward 3u, with a gradient of the stream 4u, and
    0.1u of partial sums in the kernel. Reverse-mode and vmap; one derivative with a kernel, any number with "xla".
    Where the mean square overflows float32 (|s| above 1e19) the result is 0.
    `sharding`, of all axes of x and not of the last one, lets a kernel run on each device's rows under jit.

    Raises:
        UserError: shapes or dtypes that do not fit, or an implementation that cannot run, with all reasons.
    """
    _check(x, delta, gain, shift, eps, kind)
    plan = dispatch.plan("residual_norm", x.shape, x.dtype, implementation, sharding=sharding)
    return _residual_norm(x, delta, gain, shift, float(eps), kind, plan)


def _check(
    x: jax.Array, delta: jax.Array | None, gain: jax.Array | None, shift: jax.Array | None, eps: float, kind: Kind
) -> None:
    if kind not in KINDS:
        raise dispatch.user_error(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    if not eps >= 0:
        raise dispatch.user_error(f"eps = {eps}: must be at least 0")
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise dispatch.user_error(
            f"x is {x.dtype}{list(x.shape)}: expected floating-point numbers with at least one axis"
        )
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        raise dispatch.user_error(f"delta is {delta.dtype}{list(delta.shape)}: expected {x.dtype}{list(x.shape)} as x")
    for name, vector in (("gain", gain), ("shift", shift)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise dispatch.user_error(f"{name} has shape {vector.shape}: expected {x.shape[-1:]}, x's last axis")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _residual_norm(x: Any, delta: Any, gain: Any, shift: Any, eps: float, kind: Kind, plan: Plan) -> Any:
    pallas = functools.partial(residual_norm_kernel.forward, eps=eps, kind=kind)
    xla = functools.partial(residual_norm_xla.forward, eps=eps, kind=kind)
    return dispatch.run("residual_norm", plan.forward, plan, pallas, xla, x, delta, gain, shift, roles=("xxvv", "xx"))


def _forward(x: Any, delta: Any, gain: Any, shift: Any, eps: float, kind: Kind, plan: Plan) -> Any:
    x, delta, gain, shift = (arg if arg is None else arg.value for arg in (x, delta, gain, shift))
    stream, normed = _residual_norm(x, delta, gain, shift, eps, kind, plan)
    return (stream, normed), (stream, None if delta is None else (), gain, shift)


def _backward(eps: float, kind: Kind, plan: Plan, saved: Any, cotangents: Any) -> Any:
    stream, delta, gain, shift = saved
    dstream, dy = (None if isinstance(ct, jax.custom_derivatives.SymbolicZero) else ct for ct in cotangents)
    if dy is None:
        return dstream, None if delta is None else dstream, None, None
    kernel = functools.partial(dispatch.kernels("residual_norm", plan).backward, eps=eps, kind=kind)
    xla = functools.partial(residual_norm_xla.backward, eps=eps, kind=kind)
    args = (stream, dy, dstream, gain, shift)
    dx, dgain, dshift = dispatch.run("residual_norm", plan.backward, plan, kernel, xla, *args, roles=("xxxvv", "xss"))
    return dx, None if delta is None else dx, dgain, dshift


_residual_norm.defvjp(_forward, _backward, symbolic_zeros=True)
