"""The product of an activated gate with a second projection, with its gradient: SwiGLU and GEGLU."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from pallas_kernels import dispatch, gates_kernel, gates_xla
from pallas_kernels.dispatch import Implementation, Plan

Activation = Literal["silu", "gelu"]
OPERATION = "gates"


def swiglu(
    gate: jax.Array, up: jax.Array, implementation: Implementation = "auto", sharding: NamedSharding | None = None
) -> jax.Array:
    """silu(gate) up with silu(g) = g sigmoid(g): [..., F] in gate's dtype, computed in float32 (Shazeer 2020).

    Finite, with finite gradients, wherever the exact values are. Saved for backward: gate and up. In units of U, one
    [..., F] array: forward 3U, backward 5U, as a kernel and in XLA. Reverse-mode and vmap; one derivative with a
    kernel, any number with "xla". `sharding`, of all axes of gate, lets a kernel run on each device's part under jit.

    Raises:
        UserError: shapes or dtypes that differ, or an implementation that cannot run, with all reasons.
    """
    return _gated("silu", gate, up, implementation, sharding)


def geglu(
    gate: jax.Array, up: jax.Array, implementation: Implementation = "auto", sharding: NamedSharding | None = None
) -> jax.Array:
    """gelu(gate) up with the tanh form of bias_gelu; otherwise as `swiglu`."""
    return _gated("gelu", gate, up, implementation, sharding)


def _gated(
    activation: Activation,
    gate: jax.Array,
    up: jax.Array,
    implementation: Implementation,
    sharding: NamedSharding | None,
) -> jax.Array:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.ndim == 0:
        raise dispatch.user_error(
            f"gate is {gate.dtype}{list(gate.shape)} and up {up.dtype}{list(up.shape)}: expected two equal [..., F]"
        )
    return _gate(gate, up, activation, dispatch.plan(OPERATION, gate.shape, gate.dtype, implementation, True, sharding))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gate(gate: Any, up: Any, activation: Activation, plan: Plan) -> jax.Array:
    pallas = functools.partial(gates_kernel.forward, activation=activation)
    xla = functools.partial(gates_xla.forward, activation=activation)
    return dispatch.run(OPERATION, plan.forward, plan, pallas, xla, gate, up, roles=("xx", "x"))


def _forward(gate: Any, up: Any, activation: Activation, plan: Plan) -> Any:
    return _gate(gate, up, activation, plan), (gate, up)


def _backward(activation: Activation, plan: Plan, saved: Any, dy: Any) -> Any:
    pallas = functools.partial(gates_kernel.backward, activation=activation)
    xla = functools.partial(gates_xla.backward, activation=activation)
    return dispatch.run(OPERATION, plan.backward, plan, pallas, xla, *saved, dy, roles=("xxx", "xx"))


_gate.defvjp(_forward, _backward)
