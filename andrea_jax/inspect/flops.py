"""Arithmetic of a training step, and how much of a known device it uses."""

from __future__ import annotations

import jax

from andrea_jax.config import ModelConfig

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
    """FLOPs of forward and backward per token: 6 per matrix element, 6 T D per block for causal attention.

    The output product counts, tied or not; table look-ups do not. Causal attention does half of the 12 T D of PaLM's
    appendix B. Recomputation is not counted.
    """
    block = 4 * config.d_model**2 + 2 * config.d_model * config.mlp_dim
    matrices = config.n_layer * block + config.d_model * config.vocab_size
    return 6 * matrices + 6 * config.n_layer * config.context_length * config.d_model


def model_flops_utilization(config: ModelConfig, tokens_per_second: float) -> float | None:
    """Share of the devices' peak that the model's arithmetic uses; None on a device that is not in the table."""
    kind = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    return None if peak is None else flops_per_token(config) * tokens_per_second / (peak * jax.device_count())
