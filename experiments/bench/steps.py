"""The whole training step of ANDREA-120M, as the benchmarks compile and time it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from andrea_jax.engine import EngineConfig
from andrea_jax.presets import andrea_120m
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import abstract_state, init_state
from andrea_jax.train.step import make_train_step

BLOCKS = {"train_step": "scan", "train_step_unrolled": "unroll"}


SMALL = {"d_model": 64, "n_head": 2, "n_layer": 2, "context_length": 32, "vocab_size": 100}


def step_config(name: str, form: str, rows: int, small: bool = False) -> RunConfig:
    """The run whose step takes about `rows` tokens, with `form` as the engine's kernels; `small`: a toy."""
    model = andrea_120m(**(SMALL if small else {}))
    attention = "auto" if small else "cudnn"
    engine = EngineConfig(dtype="bfloat16", attention=attention, blocks=BLOCKS[name], kernels=form)
    return RunConfig(model=model, train=TrainConfig(batch_size=max(1, rows // model.context_length)), engine=engine)


def step_arguments(config: RunConfig) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The abstract (state, batch) of a step."""
    shape = (config.train.batch_size, config.model.context_length)
    tokens, weights = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    return abstract_state(config), {"tokens_BT": tokens, "targets_BT": tokens, "weights_BT": weights}


def running_step(config: RunConfig) -> Callable[[int], jax.Array]:
    """A call that makes the next step of a run on random tokens, and returns its loss."""
    keys = jax.random.split(jax.random.key(1), 2)
    shape, V = (config.train.batch_size, config.model.context_length), config.model.vocab_size
    tokens, targets = (jax.random.randint(key, shape, 0, V) for key in keys)
    batch = {"tokens_BT": tokens, "targets_BT": targets, "weights_BT": jnp.ones(shape)}
    step, state = jax.jit(make_train_step(config), donate_argnums=0), [init_state(config)]

    def call(_: int) -> jax.Array:
        state[0], metrics = step(state[0], batch)
        return metrics["loss"]

    return call
