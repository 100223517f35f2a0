"""Byte-level BPE: frequent neighbours merge into segments. Ids: bytes 0-255, BOS 256, segments from 257."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from andrea_jax.data.tokenizer import BOS, BYTES, Tokenizer
from andrea_jax.settings import UserError


def byte_letters() -> list[str]:
    """[256] the printable letter by which byte-level tokenizers write each byte (GPT-2's table).

    Printable Latin-1 letters stand for themselves; the other 68 bytes take the code points from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def train_bpe(sample: Iterable[bytes], vocab_size: int) -> Tokenizer:
    """Learns up to `vocab_size - 257` merges; pairs seen once are left alone, so fewer may be found.

    `recipe["requested"]` and `len(recipe["merges"])` say how many were asked for and found.

    Raises:
        UserError: vocab_size is below 257.
    """
    from tokenizers import trainers

    if vocab_size <= BOS:
        raise UserError(f"ModelConfig.vocab_size = {vocab_size}: bpe needs at least 257 (256 bytes and BOS)")
    requested = vocab_size - BOS - 1
    letters = byte_letters()
    library = _library({letter: byte for byte, letter in enumerate(letters)}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=256 + requested, min_frequency=2, initial_alphabet=sorted(letters), show_progress=False
    )
    library.train_from_iterator((text.decode("utf-8", "ignore") for text in sample), trainer)
    ids = {letter: byte for byte, letter in enumerate(letters)}
    merges = []
    for left, right in json.loads(library.to_str())["model"]["merges"]:
        merges.append([ids[left], ids[right]])
        ids.setdefault(left + right, BOS + len(merges))
    return bpe_tokenizer(merges, requested)


def bpe_tokenizer(merges: list[list[int]], requested: int) -> Tokenizer:
    """Merge k joins the ids `merges[k]` into id 257 + k."""
    letters, pieces = byte_letters(), [*BYTES, b""]
    for left, right in merges:
        pieces.append(pieces[left] + pieces[right])
    spelled = ["".join(letters[byte] for byte in piece) for piece in pieces]
    vocabulary = {text: i for i, text in enumerate(spelled) if i != BOS}
    library = _library(vocabulary, [(spelled[left], spelled[right]) for left, right in merges])

    def encode_texts(texts: list[str]) -> list[Any]:
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]

    recipe = {"merges": merges, "requested": requested}
    return Tokenizer("bpe", BOS, tuple(pieces), recipe, encode_texts, np.arange(256, dtype=np.int32))


def _library(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return library
