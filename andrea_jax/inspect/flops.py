"""Arithmetic of a training step, and how much of a known device it uses."""

from __future__ import annotations

import math

import jax

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import active_part, named_specs

# dense bfloat16 products with float32 sums, FLOP/s, from the makers' data sheets
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "RTX 3060": 25.6e12,
    "L40S": 362e12,
}


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of forward and backward per token: 6 per matrix element, 6 T N H per block for causal attention.

    The output product counts, tied or not; table look-ups do not. Causal attention does half of the 12 T N H of PaLM's
    appendix B, with a window w < T only w - w^2 / 2T of T/2. Recomputation is not counted. Of
    the experts those that a token chooses count, dropped or not.
    """
    specs = [spec for spec in named_specs(config).values() if spec.matrix is not None]
    matrices = int(sum(math.prod(spec.shape) * active_part(config, spec) for spec in specs))
    T, heads = config.context_length, config.n_head * config.head_dim
    window = min(config.window or T, T)
    seen = [T / 2 if config.sees_all(layer) else window - window**2 / (2 * T) for layer in range(config.n_layer)]
    return 6 * (matrices + config.d_model * config.vocab_size) + round(12 * heads * sum(seen))


def peak_flops(kind: str) -> float | None:
    """Of a device by JAX's name for it, FLOP/s; None if it is not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)


def model_flops_utilization(config: ModelConfig, tokens_per_second: float) -> float | None:
    """Share of the devices' peak that the model's arithmetic uses; None on a device that is not in the table."""
    peak = peak_flops(jax.devices()[0].device_kind)
    return None if peak is None else flops_per_token(config) * tokens_per_second / (peak * jax.device_count())
