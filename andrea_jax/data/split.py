"""Which text trains and which validates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from andrea_jax.data.readers import Chunk, character_start


class Piece(NamedTuple):
    """Text of one document (or a part of one); `first` marks where a document starts, so BOS goes before it."""

    text: bytes
    first: bool
    validation: bool


def cut_documents(chunks: Iterable[Chunk], piece_bytes: int) -> Iterator[bytes]:
    """Whole documents, or with `piece_bytes` > 0 pieces of at most that size, cut behind the last line end in reach.

    A line longer than a piece is cut at the start of a character.
    """
    buffer = b""
    for chunk in chunks:
        if chunk.first and buffer:
            yield buffer
            buffer = b""
        buffer += chunk.text
        start = 0
        while piece_bytes and len(buffer) - start > piece_bytes:
            end = buffer.rfind(b"\n", start, start + piece_bytes) + 1
            end = end or character_start(buffer, start + piece_bytes)
            end = end if end > start else start + piece_bytes
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def document_hash(document: bytes) -> int:
    """64 bits that depend on the document's bytes only: the same text is on the same side in every corpus."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")


def hash_threshold(validation: float) -> int:
    """Documents whose hash is below it validate."""
    return int(Fraction(str(validation)) * 2**64)


def split_by_hash(documents: Iterable[bytes], threshold: int) -> Iterator[Piece]:
    """Each document whole, on the side that its hash gives."""
    for document in documents:
        yield Piece(document, True, document_hash(document) < threshold)


def tail_start(total_bytes: int, validation: float) -> int:
    """Byte at which validation starts: the last `validation` of the bytes, rounded up."""
    return total_bytes - math.ceil(Fraction(str(validation)) * total_bytes)


def split_tail(chunks: Iterable[Chunk], start: int) -> Iterator[Piece]:
    """Text before byte `start` of the corpus trains, the rest validates; never cut inside a character."""
    position = 0
    for text, first in chunks:
        cut = min(max(start - position, 0), len(text))
        cut = character_start(text, cut) if 0 < cut < len(text) else cut
        if cut:
            yield Piece(text[:cut], first, False)
        if cut < len(text):
            yield Piece(text[cut:], first and not cut, True)
        position += len(text)
