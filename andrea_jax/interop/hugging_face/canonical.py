"""When two configs compute the same function."""

from __future__ import annotations

import dataclasses
from typing import Any

from andrea_jax.config import TRAINING_ONLY, ModelConfig
from andrea_jax.layers.position import yarn_length


def canonical(config: ModelConfig) -> ModelConfig:
    """The same function, with each derived value written out and each value without effect at its default.

    Padding of the vocabulary and what matters in training only are not part of it.
    """
    default = ModelConfig()
    changes: dict[str, Any] = {
        "mlp_size": config.mlp_dim,
        "n_kv_head": config.kv_heads,
        "head_size": config.head_dim,
        "attention_scale": config.score_scale,
        "logit_scale": config.output_scale,
        "mup_width": None,
        "mup_head": None,
    }
    without_effect = ["mlp_ratio", "mlp_multiple", "vocab_multiple", *TRAINING_ONLY]
    if config.n_expert is not None:
        changes["expert_size"] = config.expert_dim
        without_effect += ["mlp_size"]
    # what the config itself refuses without effect is at its default already
    if config.global_every == 1:
        without_effect += ["window", "global_every", "rotary_local_base"]
    elif config.global_every is not None and config.global_every > config.n_layer:
        without_effect += ["global_every"]
    if config.rotary_scaling == "none" and config.rotary_local_base == config.rotary_base:
        without_effect += ["rotary_local_base"]
    if config.rotary_scaling in ("llama3", "yarn"):
        changes["rotary_original"] = config.rotary_original or config.context_length
    if config.rotary_scaling == "yarn":
        changes["rotary_length"] = config.rotary_length or yarn_length(config.rotary_factor)
    return dataclasses.replace(config, **changes | {name: getattr(default, name) for name in without_effect})
