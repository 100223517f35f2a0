"""The MLP: each position by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from andrea_jax.sharding import constrain, named, use
from pallas_kernels.bias_gelu import bias_gelu
from pallas_kernels.dispatch import Implementation


def bias_relu(
    h_BTF: jax.Array,
    bias: jax.Array | None,
    implementation: Implementation = "auto",
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """max(h + bias, 0); XLA's form whatever the implementation: there is nothing to win."""
    return jax.nn.relu(h_BTF if bias is None else h_BTF + bias.astype(h_BTF.dtype))


ACTIVATIONS = {"gelu": bias_gelu, "relu": bias_relu}


def mlp(
    p: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    activation: str,
    implementation: Implementation = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """activation(x W_1 + b_1) W_2 + b_2; the biases may be absent.

    gelu(u) = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))), Hendrycks and Gimpel 2016.
    """
    dtype = x_BTD.dtype
    sharding = None if mesh is None else named(mesh, "batch", None, "mlp")
    h_BTF = constrain(x_BTD @ use(p["w_1"], dtype, mesh, "embed", "mlp"), mesh, "batch", None, "mlp")
    h_BTF = ACTIVATIONS[activation](h_BTF, p.get("b_1"), implementation, sharding)
    y_BTD = h_BTF @ use(p["w_2"], dtype, mesh, "mlp", "embed")
    return y_BTD + p["b_2"].astype(dtype) if "b_2" in p else y_BTD
