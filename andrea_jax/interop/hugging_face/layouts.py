"""How tensors of a Hugging Face checkpoint lie in one of ours, and back. All is moved, and nothing rounded but by
CENTRED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from andrea_jax.config import ModelConfig

Read = Callable[..., np.ndarray]  # (config, *theirs), reshaped by the caller to our shape
Write = Callable[[ModelConfig, Any], tuple[Any, ...]]  # (config, ours); array methods only, so that it can be traced


class Layout(NamedTuple):
    """One of our tensors, or one block's part of it, from theirs; and theirs from ours."""

    read: Read
    write: Write


def _read_heads(config: ModelConfig, *of_heads: np.ndarray) -> np.ndarray:
    """[..., K, G + 2, H] of q [..., N H], k and v [..., K H]."""
    lead = of_heads[0].shape[:-1]
    return np.concatenate([x.reshape(*lead, config.kv_heads, -1, config.head_dim) for x in of_heads], axis=-2)


def _write_heads(config: ModelConfig, qkv: Any) -> tuple[Any, ...]:
    lead = qkv.shape[:-3]
    return tuple(x.reshape(*lead, -1) for x in (qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]))


def _read_fused(config: ModelConfig, fused: np.ndarray) -> np.ndarray:
    """[..., N, 3, H] of [..., 3 N H]."""
    return fused.reshape(*fused.shape[:-1], 3, config.n_head, config.head_dim).swapaxes(-3, -2)


def _write_fused(config: ModelConfig, qkv: Any) -> tuple[Any, ...]:
    return (qkv.swapaxes(-3, -2).reshape(*qkv.shape[:-3], -1),)


SAME = Layout(lambda config, x: x, lambda config, x: (x,))
FROM_HEADS = Layout(lambda config, x: x, lambda config, x: (x.reshape(-1, x.shape[-1]),))
TRANSPOSED = Layout(lambda config, x: x.T, lambda config, x: (x.reshape(-1, x.shape[-1]).T,))
HEADS_TRANSPOSED = Layout(
    lambda config, *x: _read_heads(config, *(y.T for y in x)),
    lambda config, x: tuple(y.T for y in _write_heads(config, x)),
)
HEADS = Layout(_read_heads, _write_heads)
FUSED = Layout(_read_fused, _write_fused)
# Gemma multiplies by 1 + weight, added in float32. A gain below 1/2 or above 2 may lose its last bits on the way back.
CENTRED = Layout(lambda config, x: x + np.float32(1), lambda config, x: (x - 1,))
