"""The MLP: each position by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from andrea_jax.config import ModelConfig
from andrea_jax.sharding import constrain, named, use
from pallas_kernels.bias_gelu import bias_gelu
from pallas_kernels.dispatch import Implementation, where_written
from pallas_kernels.gates import geglu, swiglu

GATES = {"silu": swiglu, "gelu": geglu}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda h: jnp.square(jax.nn.relu(h)),
    "silu": jax.nn.silu,
}


def mlp(
    p: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    config: ModelConfig,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """activation(x W_1 + b_1) W_2 + b_2, or gated (activation(x W_gate + b_gate) * (x W_1 + b_1)) W_2 + b_2.

    The biases may be absent. gelu(u) = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))) (Hendrycks and Gimpel 2016);
    gates: Shazeer 2020; relu2: So et al. 2021.
    """
    dtype = x_BTD.dtype
    sharding = None if mesh is None else named(mesh, "batch", None, "mlp")

    def product(weight: str, bias: str | None) -> jax.Array:
        h_BTF = constrain(x_BTD @ use(p[weight], dtype, mesh, "embed", "mlp"), mesh, "batch", None, "mlp")
        return h_BTF + p[bias].astype(dtype) if bias and bias in p else h_BTF

    gate_BTF = product("w_gate", "b_gate") if config.gated else None
    if config.activation == "gelu" and not config.gated:  # the bias is added in the GELU's own kernel
        h_BTF = activated(product("w_1", None), gate_BTF, config, implementation, sharding, p.get("b_1"))
    else:
        h_BTF = activated(product("w_1", "b_1"), gate_BTF, config, implementation, sharding)
    y_BTD = h_BTF @ use(p["w_2"], dtype, mesh, "mlp", "embed")
    return y_BTD + p["b_2"].astype(dtype) if "b_2" in p else y_BTD


def activated(
    up: jax.Array,
    gate: jax.Array | None,
    config: ModelConfig,
    implementation: Implementation,
    sharding: NamedSharding | None = None,
    gelu_bias: jax.Array | None = None,
) -> jax.Array:
    """activation(up + gelu_bias), or activation(gate) * up where there is a gate; `gelu_bias` for a plain GELU only."""
    if gate is not None:
        if config.activation in GATES:
            return GATES[config.activation](gate, up, where_written("gates", implementation), sharding)
        return ACTIVATIONS[config.activation](gate) * up
    if config.activation == "gelu":
        return bias_gelu(up, gelu_bias, implementation, sharding)
    return ACTIVATIONS[config.activation](up)
