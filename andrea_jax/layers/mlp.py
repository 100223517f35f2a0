"""The MLP: each position by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax

ACTIVATIONS = {"gelu": lambda h: jax.nn.gelu(h, approximate=True), "relu": jax.nn.relu}


def mlp(p: Mapping[str, jax.Array], x_BTD: jax.Array, activation: str) -> jax.Array:
    """activation(x W_1 + b_1) W_2 + b_2; the biases may be absent.

    gelu(u) = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))), Hendrycks and Gimpel 2016.
    """
    dtype = x_BTD.dtype
    h_BTF = x_BTD @ p["w_1"].astype(dtype)
    if "b_1" in p:
        h_BTF = h_BTF + p["b_1"].astype(dtype)
    y_BTD = ACTIVATIONS[activation](h_BTF) @ p["w_2"].astype(dtype)
    return y_BTD + p["b_2"].astype(dtype) if "b_2" in p else y_BTD
