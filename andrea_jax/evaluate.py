"""The loss of a whole split, in nats, as perplexity and in bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.loss import Batch, loss_fn
from andrea_jax.model import ENGINE
from andrea_jax.parameters import Params
from andrea_jax.sharding import local_rows, place_batch


@lru_cache(maxsize=8)
def _batch_nll(config: ModelConfig, engine: EngineConfig, mesh: Mesh | None) -> Callable[[Params, Batch], jax.Array]:
    def nll(params: Params, batch: Batch) -> jax.Array:
        return loss_fn(params, batch, config, engine, mesh=mesh)[1]["nll"]

    return jax.jit(nll, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def evaluate(
    params: Params,
    batches: Iterable[Batch],
    config: ModelConfig,
    byte_lengths: np.ndarray,
    engine: EngineConfig = ENGINE,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Token-weighted mean loss over all batches, with the loss of training; no dropout.

    loss: nats per token. perplexity: e^loss. bits_per_byte: all nats / ln 2 / bytes that the target tokens stand for
    (`byte_lengths` [V], raw bytes of each id), which does not depend on the tokenizer. tokens, bytes: what was counted.
    Over a `mesh` every process is given the same whole batches and computes its part of them.
    """
    batch_nll = _batch_nll(config, engine, mesh)
    nats, tokens, text_bytes = [], 0, 0
    for batch in batches:
        nats.append(batch_nll(params, batch if mesh is None else _place(batch, mesh)))
        counted = np.asarray(batch["weights_BT"]) > 0
        tokens += int(counted.sum())
        text_bytes += int(byte_lengths[np.asarray(batch["targets_BT"])[counted]].sum())
    total = math.fsum(float(x) for x in nats)
    loss = total / max(tokens, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total / math.log(2) / max(text_bytes, 1),
        "tokens": tokens,
        "bytes": text_bytes,
    }


def _place(batch: Batch, mesh: Mesh) -> Batch:
    size = len(batch["tokens_BT"])
    rows = local_rows(mesh, size)
    return place_batch({name: x[rows] for name, x in batch.items()}, mesh, size)
