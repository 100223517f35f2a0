"""Tokens to batches. A batch is a function of (seed, step): there is no position to save and none to lose."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from andrea_jax.data.shards import Tokens
from andrea_jax.settings import UserError

Batch = dict[str, np.ndarray]


def count_windows(tokens: Tokens, context_length: int) -> int:
    """Windows that make every token but the first a target once."""
    return math.ceil((len(tokens) - 1) / context_length)


def window(tokens: Tokens, i: int, context_length: int, bos: int | None = None) -> Batch:
    """Window i: inputs [iT, iT + T) and the tokens that follow each as targets.

    Gives `tokens_T`, `targets_T` int32 and `weights_T` float32; padding behind the last token has id 0 and weight 0.
    With `bos` also `segments_T` int32: how many BOS came so far in the window; -1 in padding. The target behind a
    document's last token, BOS, keeps its weight.
    """
    T = context_length
    ids = tokens.read(i * T, (i + 1) * T + 1)
    used = len(ids) - 1  # inputs that have a target
    padded = np.pad(ids, (0, T - used))
    out = {"tokens_T": padded[:-1].copy(), "targets_T": padded[1:], "weights_T": np.ones(T, np.float32)}
    out["tokens_T"][used:] = 0
    out["weights_T"][used:] = 0
    if bos is not None:
        out["segments_T"] = np.cumsum(out["tokens_T"] == bos, dtype=np.int32)
        out["segments_T"][used:] = -1
    return out


def make_batches(
    tokens: Tokens,
    batch_size: int,
    context_length: int,
    seed: int,
    mask_documents: bool = False,
    bos: int | None = None,
    rows: slice = slice(None),
) -> Any:
    """An endless grain.MapDataset: `batches[step]` has `tokens_BT`, `targets_BT`, `weights_BT` (and `segments_BT`).

    Each epoch has every window exactly once, in an order of its own; a batch may span two epochs. `rows` are those of
    each batch that this process reads.

    Raises:
        UserError: fewer tokens than one window; `mask_documents` without a BOS.
    """
    import grain

    if len(tokens) <= context_length:
        raise UserError(
            f"the training split has {len(tokens):,} tokens, but a window needs context_length + 1 = "
            f"{context_length + 1:,}; give data.path more text or make ModelConfig.context_length smaller"
        )
    windows = _Windows(tokens, context_length, _segment_mark(mask_documents, bos))
    # Grain takes seed + epoch for an epoch's order: a hash keeps neighbouring seeds from sharing epochs
    first = int.from_bytes(hashlib.blake2b(str(int(seed)).encode(), digest_size=4).digest(), "big")
    endless = grain.MapDataset.source(windows).shuffle(seed=first).repeat(None)
    mine = range(batch_size)[rows]
    batches = grain.MapDataset.range(len(endless) // batch_size)
    return batches.map(lambda step: _stack([endless[step * batch_size + row] for row in mine]))


def iterate(batches: Any, start_step: int, workers: int) -> Iterator[Batch]:
    """`batches[start_step]`, `batches[start_step + 1]`, ...; `workers` threads read ahead."""
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    return iter(batches.slice(slice(start_step, None)).to_iter_dataset(options))


def eval_batches(
    tokens: Tokens,
    batch_size: int,
    context_length: int,
    max_windows: int | None = None,
    mask_documents: bool = False,
    bos: int | None = None,
) -> Iterator[Batch]:
    """The windows in order, the first `max_windows` of them; rows missing in the last batch have weight 0.

    Raises:
        UserError: fewer than two tokens; `mask_documents` without a BOS.
    """
    if len(tokens) < 2:
        raise UserError(f"the split has {len(tokens)} tokens: evaluation needs at least 2; give data.path more text")
    windows = _Windows(tokens, context_length, _segment_mark(mask_documents, bos))
    count = len(windows) if max_windows is None else min(len(windows), max_windows)
    for start in range(0, count, batch_size):
        rows = [windows[i] for i in range(start, min(start + batch_size, count))]
        empty = {name: np.full_like(value, -1 if name == "segments_T" else 0) for name, value in rows[0].items()}
        yield _stack(rows + [empty] * (batch_size - len(rows)))


class _Windows:
    """`window` in the form that Grain reads."""

    def __init__(self, tokens: Tokens, context_length: int, bos: int | None) -> None:
        self.tokens, self.context_length, self.bos = tokens, context_length, bos

    def __len__(self) -> int:
        return count_windows(self.tokens, self.context_length)

    def __getitem__(self, i: int) -> Batch:
        return window(self.tokens, i % len(self), self.context_length, self.bos)


def _stack(rows: Any) -> Batch:
    return {name.replace("_T", "_BT"): np.stack([row[name] for row in rows]) for name in rows[0]}


def _segment_mark(mask_documents: bool, bos: int | None) -> int | None:
    if mask_documents and bos is None:
        raise UserError(
            "data.mask_documents = True needs a tokenizer with a BOS between documents; use bpe or bytes, "
            "or set data.mask_documents = False"
        )
    return bos if mask_documents else None
