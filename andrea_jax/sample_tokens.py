"""Tokens from a model: windows that grow by one token a step, on a cache of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.key_value_cache import KeyValueCache, decode_step, empty_cache, prefill
from andrea_jax.model import ENGINE
from andrea_jax.parameters import Params
from andrea_jax.sampling import SAMPLING, Limits, SamplingConfig, choose_tokens
from andrea_jax.settings import RunError


def sample_tokens(
    params: Params,
    prompts: Sequence[np.ndarray],
    allowed_V: np.ndarray,
    config: ModelConfig,
    sampling: SamplingConfig = SAMPLING,
    seed: int = 0,
    engine: EngineConfig = ENGINE,
) -> Iterator[np.ndarray]:
    """Endless: the next token of every row, int32 [B]; each prompt is 1 to context_length ids.

    Only ids where the bool array `allowed_V` is true are sampled. The key of a token is
    fold_in(fold_in(key(seed), row), number of tokens sampled before). A window that holds context_length tokens
    when one more comes keeps the newest context_length // 2 (at least 1), and positions count from its start again.

    Raises:
        RunError: logits that are not finite.
    """
    windows = [[int(i) for i in prompt] for prompt in prompts]
    cache = empty_cache(len(windows), config, engine)
    moved_B = np.ones(len(windows), bool)
    key, limits = jax.random.key(seed), sampling.limits(config.vocab_size)
    for count in itertools.count():
        if moved_B.any():
            cache = _fill(params, cache, windows, moved_B, config, engine)
        last_B = np.array([window[-1] for window in windows], np.int32)
        positions_B = np.array([len(window) - 1 for window in windows], np.int32)
        tokens, cache = _next_tokens(
            params, cache, last_B, positions_B, key, np.int32(count), allowed_V, limits, config, engine
        )
        tokens_B = np.asarray(tokens)
        if (tokens_B < 0).any():
            raise RunError("the model's logits are not finite: its parameters are damaged, or training diverged")
        yield tokens_B
        moved_B = np.array([len(window) == config.context_length for window in windows])
        for row, window in enumerate(windows):
            window.append(int(tokens_B[row]))
            if moved_B[row]:
                del window[: -max(1, config.context_length // 2)]


@partial(jax.jit, static_argnames=("config", "engine"), donate_argnames="cache")
def _next_tokens(
    params: Params,
    cache: KeyValueCache,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    key: jax.Array,
    count: jax.Array,
    allowed_V: jax.Array,
    limits: Limits,
    config: ModelConfig,
    engine: EngineConfig,
) -> tuple[jax.Array, KeyValueCache]:
    logits_BV, cache = decode_step(params, cache, tokens_B, positions_B, config, engine)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), count))(np.arange(len(tokens_B)))
    return choose_tokens(keys_B, logits_BV, allowed_V, limits), cache


_prefill = jax.jit(prefill, static_argnames=("config", "engine"), donate_argnames="cache")


def _fill(
    params: Params,
    cache: KeyValueCache,
    windows: list[list[int]],
    rows_B: np.ndarray,
    config: ModelConfig,
    engine: EngineConfig,
) -> KeyValueCache:
    """All but the last token of the chosen rows, padded to a power of two so that few lengths are compiled."""
    longest = max(len(window) - 1 for window, chosen in zip(windows, rows_B, strict=True) if chosen)
    if longest == 0:
        return cache
    tokens_BT = np.zeros((len(windows), min(config.context_length, max(16, 1 << (longest - 1).bit_length()))), np.int32)
    for row in np.flatnonzero(rows_B):
        tokens_BT[row, : len(windows[row]) - 1] = windows[row][:-1]
    return _prefill(params, cache, tokens_BT, rows_B, config, engine)
