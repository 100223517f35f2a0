"""Cross-entropy that never holds the logits of a whole batch, and the one loss of training and evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.routing import routing_loss
from andrea_jax.layers.scores import capped
from andrea_jax.model import ENGINE, hidden_and_routing, output_matrix
from andrea_jax.parameters import Params
from andrea_jax.sharding import ROWS, add_parts, several, use
from pallas_kernels.cross_entropy import losses_and_gradient
from pallas_kernels.dispatch import Implementation, where_written

Batch = dict[str, Any]  # tokens_BT, targets_BT int32; weights_BT float32 (0: ignored); segments_BT int32, optional


def loss_fn(
    params: Params,
    batch: Batch,
    config: ModelConfig,
    engine: EngineConfig = ENGINE,
    z_loss: float = 0.0,
    dropout_key: jax.Array | None = None,
    total_weight: jax.Array | float | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean over the batch's token weights of -ln p(target) + z_loss * logsumexp(logits)^2, float32.

    Divides by `total_weight` instead where the batch is a part of a larger one. Metrics: `nll`, the sum of
    weight * -ln p(target) in nats, and `weight`, the sum of weights. With experts, the losses of the routers are added,
    each row's times its weight, and `routing` has such sums of what each block's router did, [L, ...].
    """
    x_BTD, routing = hidden_and_routing(
        params, batch["tokens_BT"], config, engine, batch.get("segments_BT"), dropout_key, mesh
    )
    head_DV, weights_BT = output_matrix(params, config), batch["weights_BT"].astype(jnp.float32)
    total, nll = cross_entropy(
        x_BTD,
        head_DV,
        batch["targets_BT"],
        weights_BT,
        config.vocab_size,
        z_loss,
        engine.loss_chunk,
        engine.kernels,
        mesh,
        config.logit_soft_cap,
    )
    weight = weights_BT.sum()
    metrics = {"nll": nll, "weight": weight}
    if routing:
        metrics["routing"] = jax.tree.map(lambda x: jnp.tensordot(weights_BT.sum(1), x, (0, 1)), routing)
        total = total + routing_loss(metrics["routing"], config)
    return total / jnp.maximum(weight if total_weight is None else total_weight, 1e-9), metrics


def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    vocab_size: int,
    z_loss: float = 0.0,
    chunk: int = 0,
    kernels: Implementation = "auto",
    mesh: Mesh | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """sum w (nll + z_loss logsumexp^2), and sum w nll without a gradient; nll = logsumexp(l) - l[label], l = x head,
    or soft_cap tanh(x head / soft_cap).

    float32 scalars. Rows with w = 0 count for nothing, whatever their label. Columns from `vocab_size` on do not exist.
    Differentiable in x, head and w. At most max(chunk, B) rows of logits are held at a time on each device (chunk 0:
    4 D, or 64 MiB of them if that is more). The gradient is computed beside the loss, so that they are formed once
    (as in Liger Kernel, Hsu et al. 2024).
    """
    how = _How(vocab_size, z_loss, chunk, kernels, mesh, soft_cap)
    total, nll = _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, how)
    return total, jax.lax.stop_gradient(nll)


class _How(NamedTuple):
    """What of a loss is no array."""

    vocab_size: int
    z_loss: float
    chunk: int
    kernels: Implementation
    mesh: Mesh | None
    soft_cap: float | None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x_BTD, head_DV, labels_BT, weights_BT, how):
    return _on_each_device(_sums, how, x_BTD, head_DV, labels_BT, weights_BT)[0]


def _forward(x_BTD, head_DV, labels_BT, weights_BT, how):
    sums, (dx_BTD, loss_BT) = _on_each_device(_sums_and_gradients, how, x_BTD, head_DV, labels_BT, weights_BT)
    total, nll, dhead = sums
    return (total, nll), (dx_BTD, dhead.astype(head_DV.dtype), loss_BT.astype(weights_BT.dtype))


def _backward(how, saved, cotangents):
    dx_BTD, dhead, dweights_BT = ((cotangents[0] * s).astype(s.dtype) for s in saved)  # scaled in float32
    if several(how.mesh):  # added as [V, D], like the gradient of a tied table's lookup, so that XLA adds both at once
        dhead = add_parts(dhead.swapaxes(1, 2), how.mesh, "vocab", "embed").T
    return dx_BTD, dhead, None, dweights_BT


_cross_entropy.defvjp(_forward, _backward)


def _on_each_device(f, how, x_BTD, head_DV, labels_BT, weights_BT):
    """f(how, ...) with the head in x's dtype, of each device's rows; what it sums is added once, after its loop.

    Over several devices the head's gradient is left in parts, one of each device, that the backward pass adds.
    The vocabulary, where it is split, stays an axis of jit's: no kernel there, since a row's sums cross devices.
    """
    mesh = how.mesh
    narrow_DV = use(head_DV, x_BTD.dtype, mesh, "embed", "vocab")
    if not several(mesh):
        return f(how, x_BTD, narrow_DV, labels_BT, weights_BT)
    whole_vocabulary = mesh.shape["tensor"] == 1
    here = how if whole_vocabulary else how._replace(kernels="xla")

    def local(*args):
        sums, rows = f(here, *args)
        return jax.tree.map(lambda x: x[None], sums), rows

    rows, whole = PartitionSpec(ROWS), PartitionSpec()
    sums, of_rows = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, whole, rows, rows),
        out_specs=rows,
        axis_names=set(mesh.axis_names if whole_vocabulary else ROWS),
        check_vma=False,
    )(x_BTD, narrow_DV, labels_BT, weights_BT)
    return tuple(x.sum(0) for x in sums[:2]) + sums[2:], of_rows


def _sums(how, x_BTD, head_DV, labels_BT, weights_BT):
    """(sum of w loss, sum of w nll), and nothing of the rows."""

    def add(sums, chunk):  # no kernel: XLA leaves out the gradient, which nothing reads
        x_RD, labels_R, weights_R = chunk
        loss_R, nll_R, _ = _rows(x_RD, labels_R, weights_R, head_DV, how._replace(kernels="xla"))
        return (sums[0] + _weighted(weights_R, loss_R), sums[1] + _weighted(weights_R, nll_R)), None

    chunks = _chunks(_columns(how, x_BTD, head_DV), x_BTD, labels_BT, weights_BT)
    sums, _ = _scan(add, (jnp.float32(0), jnp.float32(0)), chunks)
    return sums, ()


def _sums_and_gradients(how, x_BTD, head_DV, labels_BT, weights_BT):
    """(sum of w loss, sum of w nll, float32 gradient of the head), (gradient of x, loss of each row)."""

    def add(sums, chunk):
        total, nll, dhead_DV = sums
        x_RD, labels_R, weights_R = chunk
        loss_R, nll_R, dlogits_RV = _rows(x_RD, labels_R, weights_R, head_DV, how)
        dx_RD = jnp.dot(dlogits_RV, head_DV.T)
        dhead_DV = dhead_DV + jnp.dot(x_RD.T, dlogits_RV, preferred_element_type=jnp.float32)
        return (total + _weighted(weights_R, loss_R), nll + _weighted(weights_R, nll_R), dhead_DV), (dx_RD, loss_R)

    start = (jnp.float32(0), jnp.float32(0), jnp.zeros(head_DV.shape, jnp.float32))
    chunks = _chunks(_columns(how, x_BTD, head_DV), x_BTD, labels_BT, weights_BT)
    sums, (dx, loss) = _scan(add, start, chunks)
    return sums, (_unchunk(dx, x_BTD.shape), _unchunk(loss, labels_BT.shape))


def _columns(how, x_BTD, head_DV):
    """Positions of a chunk, in chunks as even as can be."""
    B, T, D = x_BTD.shape
    # A chunk moves 14 bytes a logit on a GPU, and 12 D V for the head and its gradient: with 4 D rows a fifth of that.
    # Twice as many spare 1.6 % of the bytes of a step at V = 50,257 and cost 0.4 GiB more (compiled for an H200).
    rows = how.chunk or max(2**24 // head_DV.shape[1], 4 * D)
    return -(-T // -(-T // min(T, max(1, rows // B))))


def _rows(x_RD, labels_R, weights_R, head_DV, how: _How):
    """nll + z_loss logsumexp^2, nll, and the gradient of x head, in x's dtype, of each row.

    The logits are float32 also where x is bfloat16. Rounded, those of size 10 put 0.015 of noise on a token's loss and
    0.6 % on the gradient, ten and four times what rounding x and dlogits costs: not worth the 4 bytes a logit.
    """
    implementation = where_written("cross_entropy", how.kernels)
    logits_RV = capped(jnp.dot(x_RD, head_DV, preferred_element_type=jnp.float32), how.soft_cap)
    logsum_R, nll_R, dlogits_RV = losses_and_gradient(
        logits_RV, labels_R, weights_R, how.vocab_size, how.z_loss, x_RD.dtype, implementation
    )
    if how.soft_cap is not None:
        dlogits_RV = dlogits_RV * (1 - jnp.square(logits_RV / how.soft_cap)).astype(x_RD.dtype)
    return nll_R + how.z_loss * jnp.square(logsum_R), nll_R, dlogits_RV


def _weighted(weights_R, values_R):
    return jnp.where(weights_R == 0, 0, weights_R * values_R).sum()


def _chunks(columns, *arrays):
    """Each [B, T, ...] array as [T / columns, B * columns, ...], the last chunk padded with zeros (weight 0).

    Cut along T, so that a batch sharded over B stays where it is.
    """

    def cut(x):
        B, T = x.shape[:2]
        count = -(-T // columns)
        x = jnp.pad(x, [(0, 0), (0, count * columns - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, count, columns, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(count, B * columns, *x.shape[3:])

    return tuple(cut(x) for x in arrays)


def _unchunk(x, shape):
    B, T = shape[:2]
    x = x.reshape(x.shape[0], B, -1, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(B, -1, *x.shape[3:])[:, :T]


def _scan(step, carry, chunks):
    """lax.scan, without a loop where there is one chunk."""
    if chunks[0].shape[0] > 1:
        return jax.lax.scan(step, carry, chunks)
    carry, out = step(carry, tuple(x[0] for x in chunks))
    return carry, jax.tree.map(lambda x: x[None], out)
