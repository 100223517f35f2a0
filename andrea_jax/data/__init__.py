"""Corpus, tokenizer, token shards, windows, batch(seed, step). Shards are made by `andrea_jax.data.prepare.prepare`."""

from andrea_jax.data.config import DataConfig
from andrea_jax.data.shards import (
    Tokens,
    check_vocabulary,
    open_tokenizer,
    open_tokens,
    read_manifest,
    tokens_in_memory,
)
from andrea_jax.data.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, load_tokenizer
from andrea_jax.data.windows import count_windows, eval_batches, iterate, make_batches, window

__all__ = [
    "DataConfig",
    "Tokenizer",
    "Tokens",
    "bytes_tokenizer",
    "chars_tokenizer",
    "check_vocabulary",
    "count_windows",
    "eval_batches",
    "iterate",
    "load_tokenizer",
    "make_batches",
    "open_tokenizer",
    "open_tokens",
    "read_manifest",
    "tokens_in_memory",
    "window",
]
