"""One optimizer step, pure."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from andrea_jax.loss import Batch, loss_fn
from andrea_jax.optimizer import make_optimizer
from andrea_jax.parameters import Params
from andrea_jax.schedule import make_schedule
from andrea_jax.train.config import RunConfig
from andrea_jax.train.state import State

Metrics = dict[str, jax.Array]


def make_train_step(config: RunConfig) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function (state, batch) -> (state, metrics), to be compiled.

    A step whose loss or gradient is not finite changes only `step`.
    """
    optimizer = make_optimizer(config.optimizer, config.model)
    schedule = make_schedule(config.schedule, config.train.steps)
    base_key = jax.random.key(config.train.seed + 1) if config.model.dropout else None

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = None if base_key is None else jax.random.fold_in(base_key, state.step)
        loss, nll, grads = loss_and_gradient(state.params, batch, config, key)
        grad_norm, learning_rate = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        direction, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        params = _where(finite, params, state.params)
        optimizer_state = _where(finite, optimizer_state, state.optimizer)
        metrics = {
            "loss": loss,
            "nll": nll,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(params),
            "tokens": batch["weights_BT"].sum(),
            "finite": finite,
        }
        return State(state.step + 1, params, optimizer_state), metrics

    return train_step


def loss_and_gradient(
    params: Params, batch: Batch, config: RunConfig, dropout_key: jax.Array | None
) -> tuple[jax.Array, jax.Array, Params]:
    """Mean loss and nll over all tokens of the batch, and the gradient of the loss.

    With `train.accumulate` parts the gradients are summed one part after the other, each divided by the whole
    batch's weight, so that the result is that of the whole batch.
    """
    parts = config.train.accumulate
    weight = batch["weights_BT"].sum()

    def part_gradient(part: Batch, key: jax.Array | None):
        def loss(params):
            return loss_fn(params, part, config.model, config.engine, config.train.z_loss, key, weight)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, metrics["nll"] / jnp.maximum(weight, 1e-9), grads

    if parts == 1:
        return part_gradient(batch, dropout_key)

    def add_part(sums, numbered_part):
        number, part = numbered_part
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, number)
        return jax.tree.map(jnp.add, sums, part_gradient(part, key)), None

    split = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
    start = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add_part, start, (jnp.arange(parts), split))[0]


def _where(condition: jax.Array, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
