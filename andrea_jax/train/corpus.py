"""The token streams of a run, and the vocabulary they give the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from andrea_jax.data.prepare import prepare
from andrea_jax.data.shards import Tokens, check_vocabulary, open_tokenizer, open_tokens, read_manifest
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Both splits as tokens, the tokenizer that made them, and the folder's manifest."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens


def chosen_vocabulary(config: RunConfig, bound: Collection[str]) -> int | None:
    """The model's vocabulary where it was bound or a tokenizer is trained to it; None: the tokenizer's decides."""
    chosen = "ModelConfig.vocab_size" in bound or config.data.tokenizer == "bpe"
    return config.model.vocab_size if chosen else None


def open_corpus(
    config: RunConfig, bound: Collection[str] = (), progress: Callable[..., None] | None = None
) -> tuple[RunConfig, TokenCorpus]:
    """Prepares `data.path` (once) and opens it; the config's vocabulary becomes the tokenizer's unless it is bound.

    Raises:
        UserError: what `prepare` and the shards refuse; a vocabulary smaller than the tokenizer's.
    """
    chosen = chosen_vocabulary(config, bound)
    folder = prepare(config.data, chosen, progress)
    manifest, tokenizer = read_manifest(folder), open_tokenizer(folder)
    model = config.model
    if chosen is None:
        model = dataclasses.replace(model, vocab_size=tokenizer.size)
    check_vocabulary(manifest, model.vocab_size)
    corpus = TokenCorpus(folder, manifest, tokenizer, open_tokens(folder, "train"), open_tokens(folder, "validation"))
    if len(corpus.validation) < 2:
        raise UserError(f"{folder}: the validation split is empty; raise data.validation or give data.path more text")
    return dataclasses.replace(config, model=model), corpus
