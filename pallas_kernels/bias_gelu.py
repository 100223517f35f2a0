"""Bias and GELU in one operation, with its gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels import bias_gelu_kernel, bias_gelu_xla, dispatch
from pallas_kernels.dispatch import Implementation, Plan


def bias_gelu(
    h: jax.Array,
    bias: jax.Array | None,
    implementation: Implementation = "auto",
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """gelu(h + bias) [..., F] in h's dtype, computed in float32; `bias` [F] may be absent.

    gelu(u) = u/2 (1 + tanh(z)) = u sigmoid(2 z), z = sqrt(2/pi) (u + 0.044715 u^3)      (Hendrycks and Gimpel 2016)

    Finite, with finite gradients, for every finite u in float32, bfloat16 and float16. The pre-activation u, rounded to
    h's dtype, is all that backward saves; the bias gradient is summed in float32 and has the bias's dtype.
    In units of U, one [..., F] array: forward 3U (reads h, writes u and its gelu), backward 3U and 0.01U of partial
    sums. Reverse-mode and vmap; one derivative with a kernel, any number with "xla".
    `sharding`, of all axes of h, lets a kernel run on each device's part under jit.

    Raises:
        UserError: a shape or dtype that does not fit, or an implementation that cannot run, with all reasons.
    """
    if h.ndim == 0 or not jnp.issubdtype(h.dtype, jnp.floating):
        raise dispatch.user_error(
            f"h is {h.dtype}{list(h.shape)}: expected floating-point numbers with at least one axis"
        )
    if bias is not None and bias.shape != h.shape[-1:]:
        raise dispatch.user_error(f"bias has shape {bias.shape}: expected {h.shape[-1:]}, h's last axis")
    plan = dispatch.plan("bias_gelu", h.shape, h.dtype, implementation, bias is not None, sharding)
    return _bias_gelu(h, bias, plan)


def _pass_forward(h: Any, bias: Any, plan: Plan) -> tuple[jax.Array, jax.Array]:
    pallas, xla = bias_gelu_kernel.forward, bias_gelu_xla.forward
    return dispatch.run("bias_gelu", plan.forward, plan, pallas, xla, h, bias, roles=("xv", "xx"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _bias_gelu(h: Any, bias: Any, plan: Plan) -> jax.Array:
    return _pass_forward(h, bias, plan)[1]


def _forward(h: Any, bias: Any, plan: Plan) -> Any:
    u, y = _pass_forward(h, bias, plan)
    return y, (u, bias)


def _backward(plan: Plan, saved: Any, dy: Any) -> Any:
    u, bias = saved
    kernel, xla = dispatch.kernels("bias_gelu", plan).backward, bias_gelu_xla.backward
    return dispatch.run("bias_gelu", plan.backward, plan, kernel, xla, u, dy, bias, roles=("xxv", "xs"))


_bias_gelu.defvjp(_forward, _backward)
