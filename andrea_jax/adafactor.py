"""Adafactor, each matrix of each layer by itself: second moments as a row and a column (Shazeer and Stern 2018)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import Spec, specs

DECAY_POWER = 0.8  # the paper's: at step t the mean of before counts 1 - t^-0.8
LARGEST_RMS = 1.0  # of one matrix's step; the paper's d


def adafactor(b1: float, b2: float, model: ModelConfig) -> optax.GradientTransformation:
    """g / sqrt(v), v of a matrix = row mean x column mean / mean of squared gradients; clipped to an RMS of 1, then
    averaged by `b1` (0: not, and nothing is kept). v decays by min(b2, 1 - t^-0.8) (Zhai et al. 2021).

    Without the paper's factor of a tensor's own size, so that a learning rate means what it does for AdamW. Vectors,
    and matrices with a side below 128, keep v whole.
    """
    one = optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=DECAY_POWER, decay_rate_fn=lambda t, power: jnp.minimum(b2, 1 - (t + 1.0) ** -power)
        ),
        optax.clip_by_block_rms(LARGEST_RMS),
    )
    tensors = specs(model)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p, spec: jax.vmap(one.init)(split(p, spec)), params, tensors)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def step(gradient: jax.Array, spec: Spec, state: Any) -> tuple[jax.Array, Any]:
            pieces = split(gradient, spec)
            direction, state = jax.vmap(one.update)(pieces, state, pieces)  # of parameters it asks the shapes only
            return join(direction, spec), state

        found = jax.tree.map(step, gradients, tensors, state)
        directions, states = (jax.tree.map(lambda _, pair, i=i: pair[i], gradients, found) for i in (0, 1))
        return directions, states

    direction = optax.GradientTransformation(init, update)
    return optax.chain(direction, optax.ema(b1)) if b1 else direction


def split(x: jax.Array, spec: Spec) -> jax.Array:
    """[n, inputs, outputs], the tensor's separate matrices; a tensor that is none in each layer's part [n, ...]."""
    order, groups = _order(spec)
    return x.transpose(order).reshape(-1, *map(spec.side, groups))


def join(pieces: jax.Array, spec: Spec) -> jax.Array:
    """The tensor again."""
    order, _ = _order(spec)
    return pieces.reshape([spec.shape[i] for i in order]).transpose([order.index(i) for i in range(len(order))])


def _order(spec: Spec) -> tuple[list[int], tuple[tuple[str, ...], ...]]:
    """The axes, those that count pieces first, and the groups that make the sides of a piece."""
    groups = tuple(spec.matrix) if spec.matrix else tuple((axis,) for axis in spec.axes if axis != "layer")
    inside = [axis for group in groups for axis in group]
    return [spec.axes.index(axis) for axis in (*(a for a in spec.axes if a not in inside), *inside)], groups
