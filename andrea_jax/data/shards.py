"""Token shards on disk: little-endian ids in .bin files, and manifest.json, which is written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from andrea_jax.data.tokenizer import Tokenizer, load_tokenizer
from andrea_jax.files import write_file
from andrea_jax.settings import UserError

FORMAT = 1
SPLITS = ("train", "validation")
CHECKED_AT_OPEN = 2**30  # bytes of a split; a larger one is checked shard by shard, when first read


def token_dtype(size: int) -> np.dtype:
    """The smallest unsigned type that holds ids below `size`: uint16 up to 65,536, else uint32."""
    return np.dtype("<u2") if size <= 2**16 else np.dtype("<u4")


def write_json(path: Path, value: Any) -> None:
    """Indented JSON through `write_file`."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def write_shard(path: Path, tokens_N: np.ndarray, dtype: np.dtype) -> dict[str, Any]:
    """Writes the ids and returns the shard's entry for the manifest: file, tokens, max_token, blake2b."""
    content = np.ascontiguousarray(tokens_N.astype(dtype))
    write_file(path, content.data)
    digest = hashlib.blake2b(content.data, digest_size=16).hexdigest()
    return {"file": path.name, "tokens": len(content), "max_token": int(content.max(initial=0)), "blake2b": digest}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What a prepared folder holds.

    Raises:
        UserError: there is no manifest, or another program's or version's.
    """
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except OSError:
        raise UserError(
            f"{folder}: not a prepared folder (no manifest.json); a stopped prepare can be run again"
        ) from None
    except ValueError:
        raise UserError(f"{path}: damaged: not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("andrea_jax_shards") != FORMAT:
        raise UserError(f"{path}: not token shards of andrea_jax in format {FORMAT}; prepare the corpus again")
    return manifest


def check_vocabulary(manifest: dict[str, Any], vocab_size: int) -> None:
    """Refuses a model whose vocabulary is smaller than the tokenizer's.

    Raises:
        UserError: with both sizes.
    """
    size = manifest["tokenizer"]["size"]
    if size > vocab_size:
        kind = manifest["tokenizer"]["kind"]
        raise UserError(
            f"ModelConfig.vocab_size = {vocab_size}, but the tokenizer ({kind}) makes {size} ids; "
            f"set ModelConfig.vocab_size = {size} or more"
        )


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made a prepared folder."""
    return load_tokenizer(Path(folder) / "tokenizer.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """One split as a long row of ids. `len(tokens)`, `tokens.read(start, stop)`."""

    shards: tuple[np.ndarray, ...]
    starts: np.ndarray  # int64 [shards + 1]
    unchecked: dict[int, tuple[Path, str]]  # shards whose content was not compared with its hash yet

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start], across shards; fewer at the end of the split.

        Raises:
            UserError: naming a shard whose content was altered.
        """
        start, stop = max(start, 0), min(stop, len(self))
        if start >= stop:
            return np.empty(0, np.int32)
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, stop, "left"))
        parts = []
        for i in range(first, last):
            self.check(i)
            offset = int(self.starts[i])
            parts.append(self.shards[i][max(start - offset, 0) : stop - offset])
        return np.concatenate(parts).astype(np.int32)

    def check(self, i: int) -> None:
        """Compares shard i with its hash, once."""
        if i in self.unchecked:
            path, digest = self.unchecked[i]
            if hashlib.blake2b(self.shards[i].data, digest_size=16).hexdigest() != digest:
                raise UserError(f"{path}: its content was altered (the hash differs); delete the folder, prepare again")
            self.unchecked.pop(i, None)


def tokens_in_memory(ids: Any) -> Tokens:
    """An array of ids as `Tokens`, for notebooks."""
    array = np.asarray(ids, np.int32).ravel()
    return Tokens((array,), np.array([0, len(array)], np.int64), {})


def open_tokens(folder: str | Path, split: str) -> Tokens:
    """A split of a prepared folder, mapped into memory. Content is checked against its hash now, or, where the split
    has more than 1 GiB, for each shard when it is first read.

    Raises:
        UserError: no such folder or split; a shard that is missing, cut off or altered, by name.
    """
    manifest = read_manifest(folder)
    if split not in SPLITS:
        raise UserError(f"split = {split!r}: expected train or validation")
    dtype = np.dtype(manifest["dtype"])
    shards: list[np.ndarray] = []
    starts, unchecked = [0], {}
    for entry in (entry for entry in manifest["shards"] if entry["split"] == split):
        path = Path(folder) / entry["file"]
        size, expected = path.stat().st_size if path.exists() else None, entry["tokens"] * dtype.itemsize
        if size != expected:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise UserError(f"{path}: {found}, expected {expected:,} bytes; delete the folder and prepare again")
        unchecked[len(shards)] = (path, entry["blake2b"])
        shards.append(np.memmap(path, dtype, "r"))
        starts.append(starts[-1] + entry["tokens"])
    tokens = Tokens(tuple(shards), np.array(starts, np.int64), unchecked)
    if len(tokens) * dtype.itemsize <= CHECKED_AT_OPEN:
        for i in range(len(shards)):
            tokens.check(i)
    return tokens
