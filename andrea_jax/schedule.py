"""Learning rate as a function of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from andrea_jax.settings import UserError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Shape of the learning rate: a warm-up, times cosine, warmup-stable-decay, inverse square root or constant."""

    SECTION: ClassVar[str] = "schedule"
    kind: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = setting(
        "cosine", "cosine, warmup-stable-decay, inverse square root of the step, or constant; each times the warm-up"
    )
    peak: float = setting(8e-3, "largest learning rate", above=0)
    floor: float | None = setting(None, "last learning rate / peak (cosine and wsd); None: 0", at_least=0, at_most=1)
    warmup: int = setting(100, "steps of linear warm-up: factor min(1, (t + 1) / warmup)", at_least=0)
    length: int | None = setting(None, "steps from start to floor (cosine and wsd); None: train.steps", at_least=1)
    decay: int | None = setting(None, "last steps, over which wsd falls; None: a fifth of its length", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.decay is not None and self.kind != "wsd":
            raise UserError(
                f"schedule.decay = {self.decay} has no effect with schedule.kind = '{self.kind}'; only with 'wsd'"
            )
        for name, value in (("length", self.length), ("floor", self.floor)):
            if value is not None and self.kind not in ("cosine", "wsd"):
                raise UserError(f"schedule.{name} = {value} has no effect with schedule.kind = '{self.kind}'")


def make_schedule(config: ScheduleConfig, steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """Learning rate at step t (from 0), float32; `steps` is the length when the config names none.

    cosine: peak * (floor + (1 - floor) * (1 + cos(pi t / length)) / 2) * min(1, (t + 1) / warmup); after `length` the
    floor.
    wsd: peak, then linear to peak * floor over the last `decay` steps of `length`. inverse_sqrt: peak until the end of
    the warm-up, then peak * sqrt(warmup / (t + 1)) (Vaswani et al. 2017), whatever the length of the run; a warm-up of
    0 counts as 1. The warm-up factor multiplies each.

    Raises:
        UserError: a decay longer than the schedule.
    """
    length = config.length or steps
    decay = config.decay or max(1, length // 5)
    floor, warmup = config.floor or 0.0, max(config.warmup, 1)
    if config.kind == "wsd" and decay > length:
        raise UserError(f"schedule.decay = {decay} is longer than the schedule, {length} steps")

    def learning_rate(t: jax.Array | int) -> jax.Array:
        t = jnp.asarray(t, jnp.float32)
        if config.kind == "cosine":
            shape = (1 + jnp.cos(jnp.pi * jnp.minimum(t / length, 1))) / 2
        elif config.kind == "wsd":
            shape = jnp.clip((length - t) / decay, 0, 1)
        elif config.kind == "inverse_sqrt":
            shape = jnp.sqrt(warmup / jnp.maximum(t + 1, warmup))
        else:
            shape = jnp.ones_like(t)
        return config.peak * (floor + (1 - floor) * shape) * jnp.minimum(1, (t + 1) / warmup)

    return learning_rate
