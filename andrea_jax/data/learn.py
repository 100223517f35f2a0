"""The tokenizer that `data.tokenizer` names: made, learned from the corpus, or loaded."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from andrea_jax.data.bpe import train_bpe
from andrea_jax.data.config import DataConfig
from andrea_jax.data.split import Piece, document_hash
from andrea_jax.data.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, load_tokenizer
from andrea_jax.settings import UserError

SAMPLE_BYTES = 2**26  # of training text that bpe learns from
VOCABULARY = 8449  # of bpe where no model says otherwise


def make_tokenizer(
    config: DataConfig, vocab_size: int | None, pieces: Callable[[], Iterator[Piece]], remote: bool
) -> Tokenizer:
    """`pieces()` reads the corpus from its start. Characters come from all of it, bpe from a sample of what trains.

    Raises:
        UserError: a file that is no tokenizer, or vocab_size too small for bpe.
    """
    if config.tokenizer == "bytes":
        return bytes_tokenizer()
    if config.tokenizer == "chars":
        characters: set[str] = set()
        for piece in pieces():
            characters.update(piece.text.decode("utf-8", "ignore"))
        return chars_tokenizer("".join(characters), config.byte_fallback)
    if config.tokenizer == "bpe":
        training = (piece.text for piece in pieces() if not piece.validation)
        return train_bpe(first_bytes(training) if remote else sample(training), vocab_size or VOCABULARY)
    return load_tokenizer(config.tokenizer)


def sample(texts: Iterable[bytes], size: int = SAMPLE_BYTES) -> list[bytes]:
    """Texts of at most `size` bytes together, chosen by hash from all of them, in their order."""
    kept: list[tuple[int, bytes]] = []
    total, limit = 0, 2**64
    for text in texts:
        if (rank := document_hash(b"sample" + text)) >= limit:
            continue
        kept.append((rank, text))
        total += len(text)
        while total > size and limit > 1:  # half of what is kept goes, and so will half of what comes
            limit //= 2
            kept = [(rank, text) for rank, text in kept if rank < limit]
            total = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def first_bytes(texts: Iterable[bytes], size: int = SAMPLE_BYTES) -> Iterator[bytes]:
    """The texts at the start, at most `size` bytes together: what comes over a network is not read twice."""
    for text in texts:
        size -= len(text)
        if size < 0:
            return
        yield text


def tokenizer_identity(config: DataConfig, vocab_size: int | None) -> Any:
    """JSON-able; equal where `make_tokenizer` would give the same tokenizer for the same corpus.

    Raises:
        UserError: `config.tokenizer` is neither a kind nor a file.
    """
    kinds = {"bytes": None, "chars": config.byte_fallback, "bpe": [vocab_size or VOCABULARY, SAMPLE_BYTES]}
    if config.tokenizer in kinds:
        return [config.tokenizer, kinds[config.tokenizer]]
    if not Path(config.tokenizer).is_file():
        close = difflib.get_close_matches(config.tokenizer, kinds, n=1)
        hint = f"did you mean {close[0]}?" if close else "expected bpe, bytes, chars or the path of a tokenizer.json"
        raise UserError(f"data.tokenizer = {config.tokenizer!r}: there is no such file; {hint}")
    return load_tokenizer(config.tokenizer).to_dict()


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """kind, size and bos; for bpe also the merges requested and found."""
    facts = {"kind": tokenizer.kind, "size": tokenizer.size, "bos": tokenizer.bos}
    if tokenizer.kind == "bpe":
        facts |= {"requested": tokenizer.recipe["requested"], "found": len(tokenizer.recipe["merges"])}
    return facts
