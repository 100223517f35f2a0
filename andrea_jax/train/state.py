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
    """Steps done (int32), float32 parameters, the optimizer's state, and, with `train.ema`, averaged parameters."""

    step: jax.Array
    params: Params
    optimizer: Any
    average: Params | None = None

    @property
    def evaluated(self) -> Params:
        """The parameters that evaluations and samples use: the average where there is one."""
        return self.params if self.average is None else self.average


def init_state(config: RunConfig) -> State:
    """The state before the first step, from `train.seed`."""
    params = init_params(jax.random.key(config.train.seed), config.model)
    optimizer = make_optimizer(config.optimizer, config.model).init(params)
    return State(jnp.int32(0), params, optimizer, None if config.train.ema is None else copied(params))


def copied(params: Params) -> Params:
    """The same numbers in arrays of their own, so that both can be donated."""
    return jax.tree.map(jnp.copy, params)


def abstract_state(config: RunConfig) -> State:
    """Shapes and dtypes of the state, nothing allocated."""
    return jax.eval_shape(lambda: init_state(config))
