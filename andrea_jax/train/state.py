"""What a run must remember between steps."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from andrea_jax.optimizer import make_optimizer
from andrea_jax.parameters import Params, init_params
from andrea_jax.train.config import RunConfig


@flax.struct.dataclass
class State:
    """Steps done (int32), float32 parameters, and the optimizer's state."""

    step: jax.Array
    params: Params
    optimizer: Any


def init_state(config: RunConfig) -> State:
    """The state before the first step, from `train.seed`."""
    params = init_params(jax.random.key(config.train.seed), config.model)
    return State(jnp.int32(0), params, make_optimizer(config.optimizer, config.model).init(params))


def abstract_state(config: RunConfig) -> State:
    """Shapes and dtypes of the state, nothing allocated."""
    return jax.eval_shape(lambda: init_state(config))
