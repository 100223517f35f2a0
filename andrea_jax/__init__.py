"""Train GPT-style language models with pure JAX functions."""

from andrea_jax.checkpoint import load_checkpoint
from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.evaluate import evaluate
from andrea_jax.generate import generate, stream
from andrea_jax.layers.routing import move_router_bias
from andrea_jax.loss import cross_entropy, loss_fn
from andrea_jax.model import block_forward, model_forward
from andrea_jax.parameters import abstract_params, count_parameters, decay_mask, init_params, specs
from andrea_jax.presets import (
    PRESETS,
    andrea_12m,
    andrea_12m_card,
    andrea_120m,
    andrea_120m_card,
    andrea_480m,
    andrea_modern_12m,
    andrea_modern_120m,
    andrea_modern_480m,
    andrea_nano,
)
from andrea_jax.sampling import SamplingConfig
from andrea_jax.settings import RunError, UserError

__all__ = [
    "PRESETS",
    "EngineConfig",
    "ModelConfig",
    "RunError",
    "SamplingConfig",
    "UserError",
    "abstract_params",
    "andrea_12m",
    "andrea_12m_card",
    "andrea_120m",
    "andrea_120m_card",
    "andrea_480m",
    "andrea_modern_12m",
    "andrea_modern_120m",
    "andrea_modern_480m",
    "andrea_nano",
    "block_forward",
    "count_parameters",
    "cross_entropy",
    "decay_mask",
    "evaluate",
    "generate",
    "init_params",
    "load_checkpoint",
    "loss_fn",
    "model_forward",
    "move_router_bias",
    "specs",
    "stream",
]
