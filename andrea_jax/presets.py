"""Models by name. Each preset is a function that returns a ModelConfig; fields can be replaced."""

from __future__ import annotations

import dataclasses
from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.settings import UserError, nearest


def _with(base: ModelConfig, **changes: Any) -> ModelConfig:
    names = [field.name for field in dataclasses.fields(base)]
    for name in changes:
        if name not in names:
            raise UserError(f"ModelConfig.{name}: no such field{nearest(name, names)}")
    return dataclasses.replace(base, **changes)


def andrea_12m(**changes: Any) -> ModelConfig:
    """ANDREA-12M: 6 blocks of width 384, as the course describes it."""
    base = ModelConfig(vocab_size=4353, d_model=384, n_layer=6, n_head=12)
    return _with(base, **changes)


def andrea_120m(**changes: Any) -> ModelConfig:
    """ANDREA-120M: 12 blocks of width 768, as its block lesson describes it."""
    return _with(ModelConfig(), **changes)


def andrea_480m(**changes: Any) -> ModelConfig:
    """ANDREA-480M: 16 blocks of width 1536."""
    base = ModelConfig(d_model=1536, n_layer=16, n_head=24)
    return _with(base, **changes)


def andrea_nano(**changes: Any) -> ModelConfig:
    """A model that learns something in two minutes on two CPU cores."""
    base = ModelConfig(vocab_size=2305, context_length=128, d_model=128, n_layer=4, n_head=4)
    return _with(base, **changes)


_CARD = dict(tie_embeddings=False, mlp_bias=False, norm_gain=False, norm_shift=False)


def andrea_12m_card(**changes: Any) -> ModelConfig:
    """The layout that gives the 12,780,288 parameters of ANDREA-12M's model card."""
    return _with(andrea_12m(vocab_size=2305, **_CARD), **changes)


def andrea_120m_card(**changes: Any) -> ModelConfig:
    """The layout that gives the 98,698,752 parameters of ANDREA-120M's model card."""
    return _with(andrea_120m(**_CARD), **changes)


_MODERN = dict(
    position="rotary",
    norm="rms",
    norm_shift=False,
    qk_norm=True,  # trains at larger learning rates
    activation="silu",
    gated=True,
    mlp_ratio=8 / 3,  # three matrices of this width are as large as two of width 4 D
    mlp_multiple=64,
    mlp_bias=False,
    vocab_multiple=64,
)


def andrea_modern_12m(**changes: Any) -> ModelConfig:
    """ANDREA-12M's sizes with the block of today's models: rotary positions, RMS norms, SwiGLU, no biases."""
    return _with(andrea_12m(**_MODERN), **changes)


def andrea_modern_120m(**changes: Any) -> ModelConfig:
    """ANDREA-120M's sizes with that block."""
    return _with(andrea_120m(**_MODERN), **changes)


def andrea_modern_480m(**changes: Any) -> ModelConfig:
    """ANDREA-480M's sizes with that block."""
    return _with(andrea_480m(**_MODERN), **changes)


_FUNCTIONS = (
    andrea_nano,
    andrea_12m,
    andrea_120m,
    andrea_480m,
    andrea_12m_card,
    andrea_120m_card,
    andrea_modern_12m,
    andrea_modern_120m,
    andrea_modern_480m,
)
PRESETS = {f.__name__: f for f in _FUNCTIONS}
