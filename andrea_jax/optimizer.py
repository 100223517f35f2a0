"""AdamW with clipping by the global norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import decay_mask
from andrea_jax.settings import check_fields, setting


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019); weight decay touches matrices only, by the parameter specs."""

    SECTION: ClassVar[str] = "optimizer"
    b1: float = setting(0.9, "decay of the mean of gradients", at_least=0, at_most=0.999999)
    b2: float = setting(0.999, "decay of the mean of squared gradients", at_least=0, at_most=0.999999)
    eps: float = setting(1e-8, "added to the root of the second moment", at_least=0)
    weight_decay: float = setting(0.1, "decoupled; times the learning rate, on matrices only", at_least=0)
    clip_norm: float | None = setting(1.0, "gradients are scaled down to this global L2 norm; None: never", above=0)

    def __post_init__(self) -> None:
        check_fields(self)


def make_optimizer(config: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """The direction of descent: clipped by the global norm of the whole gradient, Adam, plus decoupled weight decay.

    The training step multiplies it by -learning rate, so that the schedule follows the step and nothing else.
    """
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(model)),
    )
