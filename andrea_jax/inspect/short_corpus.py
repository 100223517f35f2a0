"""The beginning of a prepared corpus as a prepared corpus of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from andrea_jax.data.shards import Tokens, write_json, write_shard
from andrea_jax.files import write_file
from andrea_jax.train.corpus import TokenCorpus


def shorten(corpus: TokenCorpus, folder: Path, train: int, validation: int) -> Path:
    """Writes so many tokens of both splits to `folder`, which `data.path` can name."""
    folder.mkdir(parents=True)
    dtype = np.dtype(corpus.manifest["dtype"])

    def shard(split: str, tokens: Tokens, count: int) -> dict[str, object]:
        return {"split": split} | write_shard(folder / f"{split}-00000.bin", tokens.read(0, count), dtype)

    shards = [shard("train", corpus.train, train), shard("validation", corpus.validation, validation)]
    write_file(folder / "tokenizer.json", (corpus.folder / "tokenizer.json").read_bytes())
    write_json(
        folder / "manifest.json", {k: v for k, v in corpus.manifest.items() if k != "splits"} | {"shards": shards}
    )
    return folder
