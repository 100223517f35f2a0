"""What tells attention where a token stands: rotations of queries and keys, and ALiBi's slopes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from andrea_jax.config import ModelConfig


def rotate(x_BTNH: jax.Array, positions: jax.Array, config: ModelConfig, sees_all: jax.Array | bool) -> jax.Array:
    """Each pair (x_i, x_{i + H/2}) turned by position * frequency_i, in float32; x's dtype (Su et al. 2021).

    `positions` [T] or [B, T]. Blocks with a window turn by `rotary_local_base` where there is one, without scaling. A
    model without rotary positions leaves x as it is.
    """
    if config.position != "rotary":
        return x_BTNH
    everywhere_h, factor = rotary_frequencies(config)
    frequencies_h, length = jnp.asarray(everywhere_h), jnp.float32(factor)
    if config.rotary_local_base is not None:
        local_h = _frequencies(config.rotary_local_base, config.head_dim)
        frequencies_h = jnp.where(sees_all, frequencies_h, local_h)
        length = jnp.where(sees_all, length, 1.0)
    angles_Th = positions[..., None].astype(jnp.float32) * frequencies_h
    cos_T1h, sin_T1h = (f(angles_Th)[..., None, :] * length for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos_T1h - right * sin_T1h, right * cos_T1h + left * sin_T1h]
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """(frequencies [H/2] in radians a position, float32; the factor of the rotated vectors' length).

    none: base^(-2i/H). linear: divided by rotary_factor (Chen et al. 2023). llama3: kept where the original context
    has more than rotary_fast turns, divided where fewer than rotary_slow, between them mixed (Llama 3 2024). yarn:
    mixed along the frequency's number instead, and vectors rotary_length times as long (Peng et al. 2023).
    """
    kept_h = _frequencies(config.rotary_base, config.head_dim)
    stretched_h = kept_h / np.float32(config.rotary_factor)
    original = config.rotary_original or config.context_length
    slow, fast = config.rotary_slow, config.rotary_fast
    if config.rotary_scaling == "none":
        return kept_h, 1.0
    if config.rotary_scaling == "linear":
        return stretched_h, 1.0
    if config.rotary_scaling == "llama3":
        turns_h = original * kept_h / (2 * math.pi)
        keep_h = np.clip((turns_h - slow) / (fast - slow), 0, 1)
        return (keep_h * kept_h + (1 - keep_h) * stretched_h).astype(np.float32), 1.0
    first, last = (_number_of(turns, original, config) for turns in (fast, slow))
    first, last = max(math.floor(first), 0), min(math.ceil(last), config.head_dim - 1)
    ramp_h = np.clip((np.arange(config.head_dim // 2) - first) / max(last - first, 0.001), 0, 1)
    frequencies_h = ramp_h * stretched_h + (1 - ramp_h) * kept_h
    return frequencies_h.astype(np.float32), config.rotary_length or yarn_length(config.rotary_factor)


def yarn_length(factor: float) -> float:
    """How much longer yarn makes queries and keys whose context grew by `factor`, unless told otherwise."""
    return 0.1 * math.log(factor) + 1.0


def _frequencies(base: float, head_dim: int) -> np.ndarray:
    return (1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)


def _number_of(turns: float, context: int, config: ModelConfig) -> float:
    """The number i of the frequency that makes so many turns in a context."""
    return config.head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))


def alibi_slopes(n_head: int) -> np.ndarray:
    """[N] float32: 2^(-8i/N) for N a power of two, else those of the power below and every second of the one above
    (Press et al. 2022). Scores lose slope times distance."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    more = [2 ** (-4 * i / power) for i in range(1, 2 * (n_head - power), 2)]
    return np.asarray(slopes + more, np.float32)
