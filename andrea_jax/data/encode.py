"""Pieces of text to shard files, in units that can be done anywhere, in any order, again."""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from andrea_jax.data.shards import SPLITS, token_dtype, write_json, write_shard
from andrea_jax.data.split import Piece
from andrea_jax.data.tokenizer import Tokenizer, load_tokenizer

UNIT_BYTES = 2**24  # of text: what a kill can cost, and about twice the bytes of a shard of uint16
BATCH_BYTES = 2**20  # the tokenizers library needs some hundred bytes of memory a token
Unit = list[Piece]
Entries = list[dict[str, Any]]


def encode_corpus(
    pieces: Iterable[Piece], folder: Path, tokenizer: Tokenizer, boundary: int, processes: int, unit_bytes: int
) -> Iterator[Entries]:
    """Manifest entries of each unit's shards, in corpus order. A unit whose record is in `folder` is not done again.

    A unit is pieces in a row that have `unit_bytes` together; `boundary` is noted in the records.
    """
    units = _units(pieces, unit_bytes)
    if processes <= 1:
        for number, unit in enumerate(units):
            yield _known(folder, number, boundary) or encode_unit(tokenizer, folder, number, unit, boundary)
        return
    spawn = multiprocessing.get_context("spawn")  # JAX has threads, so fork is not safe
    waiting: collections.deque[Any] = collections.deque()
    pool = ProcessPoolExecutor(processes, spawn, _start, (str(folder),))
    try:
        for number, unit in enumerate(units):
            known = _known(folder, number, boundary)
            waiting.append(known or pool.submit(_encode_here, number, unit, boundary))
            if len(waiting) > 2 * processes:  # so the units in memory stay few
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def encode_unit(tokenizer: Tokenizer, folder: Path, number: int, unit: Unit, boundary: int) -> Entries:
    """Writes the unit's shards, then its record `unit-00000.json`; returns the shards' manifest entries."""
    shards = []
    for split, validation in zip(SPLITS, (False, True), strict=True):
        chosen = [piece for piece in unit if piece.validation == validation]
        path = folder / f"{split}-{number:05}.bin"
        if not chosen:
            path.unlink(missing_ok=True)  # of a pass with another boundary
            continue
        tokens_N = np.concatenate([*_encode(tokenizer, chosen)])
        counts = {"documents": sum(piece.first for piece in chosen), "bytes": sum(len(piece.text) for piece in chosen)}
        shards.append({"split": split} | write_shard(path, tokens_N, token_dtype(tokenizer.size)) | counts)
    write_json(_record_path(folder, number), {"boundary": boundary, "shards": shards})
    return shards


def _encode(tokenizer: Tokenizer, pieces: list[Piece]) -> Iterator[np.ndarray]:
    bos = [] if tokenizer.bos is None else [np.array([tokenizer.bos], np.int32)]
    for batch in _units(pieces, BATCH_BYTES):
        for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            yield from bos if piece.first else ()
            yield ids


def _units(pieces: Iterable[Piece], unit_bytes: int) -> Iterator[Unit]:
    unit, size = [], 0
    for piece in pieces:
        unit.append(piece)
        size += len(piece.text)
        if size >= unit_bytes:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _known(folder: Path, number: int, boundary: int) -> Entries | None:
    """The entries of a unit that is done."""
    try:
        record = json.loads(_record_path(folder, number).read_text())
    except FileNotFoundError:
        return None
    complete = all((folder / shard["file"]).exists() for shard in record["shards"])
    return record["shards"] if complete and record["boundary"] == boundary else None


def _result(entry: Entries | Future) -> Entries:
    return entry.result() if isinstance(entry, Future) else entry


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"unit-{number:05}.json"


_here: dict[str, Any] = {}  # one worker process's folder and tokenizer


def _start(folder: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _here.update(folder=Path(folder), tokenizer=load_tokenizer(Path(folder) / "tokenizer.json"))

    def die_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()


def _encode_here(number: int, unit: Unit, boundary: int) -> Entries:
    return encode_unit(_here["tokenizer"], _here["folder"], number, unit, boundary)
