"""The MLP: each position by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from pallas_kernels.bias_gelu import bias_gelu
from pallas_kernels.dispatch import Implementation


def bias_relu(h_BTF: jax.Array, bias: jax.Array | None, implementation: Implementation = "auto") -> jax.Array:
    """max(h + bias, 0); XLA's form whatever the implementation: there is nothing to win."""
    return jax.nn.relu(h_BTF if bias is None else h_BTF + bias.astype(h_BTF.dtype))


ACTIVATIONS = {"gelu": bias_gelu, "relu": bias_relu}


def mlp(
    p: Mapping[str, jax.Array], x_BTD: jax.Array, activation: str, implementation: Implementation = "auto"
) -> jax.Array:
    """activation(x W_1 + b_1) W_2 + b_2; the biases may be absent.

    gelu(u) = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))), Hendrycks and Gimpel 2016.
    """
    dtype = x_BTD.dtype
    h_BTF = ACTIVATIONS[activation](x_BTD @ p["w_1"].astype(dtype), p.get("b_1"), implementation)
    y_BTD = h_BTF @ p["w_2"].astype(dtype)
    return y_BTD + p["b_2"].astype(dtype) if "b_2" in p else y_BTD
