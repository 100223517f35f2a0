"""One optimizer step, pure."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from andrea_jax.layers.dropout import row_keys
from andrea_jax.layers.routing import Routing, move_router_bias, no_routing, routing_metrics
from andrea_jax.loss import Batch, loss_fn
from andrea_jax.optimizer import make_optimizer
from andrea_jax.parameters import Params
from andrea_jax.schedule import make_schedule
from andrea_jax.train.config import RunConfig
from andrea_jax.train.state import State

Metrics = dict[str, jax.Array]


def make_train_step(
    config: RunConfig, mesh: Mesh | None = None, axis: str | None = None
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function (state, batch) -> (state, metrics), to be compiled.

    A step whose loss or gradient is not finite changes only `step`. Over a `mesh` the arrays are whole ones, split as
    sharding.py says; under pmap `axis` is its axis, the batch a device's part and the result that of all parts.
    """
    optimizer = make_optimizer(config.optimizer, config.model, mesh)
    schedule = make_schedule(config.schedule, config.train.steps)
    base_key = jax.random.key(config.train.seed + 1) if config.model.dropout else None

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = None if base_key is None else jax.random.fold_in(base_key, state.step)
        loss, nll, grads, routing = loss_and_gradient(state.params, batch, config, key, mesh, axis)
        grad_norm, learning_rate = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        direction, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        params = move_router_bias(params, routing, config.model)
        params = _where(finite, params, state.params)
        optimizer_state = _where(finite, optimizer_state, state.optimizer)
        average = _where(finite, averaged(state, params, config.train.ema), state.average)
        metrics = {
            "loss": loss,
            "nll": nll,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(params),
            "tokens": _over_devices(batch["weights_BT"].sum(), axis),
            "finite": finite,
            **routing_metrics(routing),
        }
        return State(state.step + 1, params, optimizer_state, average), metrics

    return train_step


def averaged(state: State, params: Params, decay: float | None) -> Params | None:
    """average + (1 - d)(params - average), d = min(decay, (1 + t) / (10 + t)) after t steps: soon rid of the start."""
    if decay is None:
        return None
    t = state.step.astype(jnp.float32)
    part = 1 - jnp.minimum(decay, (1 + t) / (10 + t))
    return jax.tree.map(lambda mean, p: mean + part * (p - mean), state.average, params)


def loss_and_gradient(
    params: Params,
    batch: Batch,
    config: RunConfig,
    dropout_key: jax.Array | None,
    mesh: Mesh | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array, Params, Routing]:
    """Mean loss and nll over all tokens of the batch, the gradient of the loss, and what the routers did on the mean.

    With `train.accumulate` parts the gradients are summed one part after the other, each divided by the whole
    batch's weight, so that the result is that of the whole batch.
    """
    parts, rows = config.train.accumulate, len(batch["tokens_BT"])
    weight = _over_devices(batch["weights_BT"].sum(), axis)
    keys_B = row_keys(dropout_key, rows * jax.lax.axis_size(axis) if axis else rows)
    if axis and keys_B is not None:
        keys_B = jax.lax.dynamic_slice_in_dim(keys_B, jax.lax.axis_index(axis) * rows, rows)

    def part_gradient(part: Batch, keys_B: jax.Array | None):
        def loss(params):
            return loss_fn(params, part, config.model, config.engine, config.train.z_loss, keys_B, weight, mesh)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        nll, routing = jax.tree.map(
            lambda x: x / jnp.maximum(weight, 1e-9), (metrics["nll"], metrics.get("routing", {}))
        )
        return value, nll, grads, routing

    if parts == 1:
        return _over_devices(part_gradient(batch, keys_B), axis)

    def add_part(sums, part):
        return jax.tree.map(jnp.add, sums, part_gradient(*part)), None

    def split(x):  # every `parts`-th row, so that each device cuts its own rows
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    start = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params), no_routing(config.model))
    sums, _ = jax.lax.scan(add_part, start, jax.tree.map(split, (batch, keys_B)))
    return _over_devices(sums, axis)


def _over_devices(tree, axis: str | None):
    """Sums over the devices of pmap's axis."""
    return jax.lax.psum(tree, axis) if axis else tree


def _where(condition: jax.Array, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
