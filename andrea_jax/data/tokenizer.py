"""Text to token ids and back: bytes, characters, byte-level BPE, or any Hugging Face tokenizer.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from andrea_jax.files import write_file
from andrea_jax.settings import UserError

BOS = 256  # of our own tokenizers: bytes are 0-255, segments or characters start at 257
BYTES = tuple(bytes([value]) for value in range(256))


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """One tokenizer of any kind. Text is bytes; ids are int32.

    `decode(encode(text)) == text` for any bytes with kinds bytes, bpe and chars with byte_fallback. Kind hf: see
    `hf_tokenizer`. `decode` joins `pieces`, so lengths in bytes add up id by id.
    """

    kind: str  # bytes, chars, bpe or hf
    bos: int | None
    pieces: tuple[bytes, ...]  # the bytes each id stands for; BOS and other marks: b""
    recipe: dict[str, Any]  # JSON-able; what `from_dict` needs beside the kind
    encode_texts: Callable[[list[str]], Sequence[Any]]  # ids of each text; texts are valid Unicode
    byte_ids: np.ndarray | None  # [256] ids of single bytes, for what is not UTF-8
    ends: tuple[int, ...] = ()  # ids that end a text, beside BOS

    @property
    def size(self) -> int:
        """Number of ids: each is below it."""
        return len(self.pieces)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int32 [size]: raw bytes that each id stands for."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    def encode(self, text: str | bytes) -> np.ndarray:
        """int32 ids, without BOS.

        Raises:
            UserError: kind chars without byte_fallback: an unknown character or a byte that is not UTF-8.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each; faster than one by one."""
        runs = [self._runs(text) for text in texts]
        encoded = iter(self.encode_texts([run for of_text in runs for run in of_text if isinstance(run, str)]))
        return [
            np.concatenate(
                [np.empty(0, np.int32)] + [next(encoded) if isinstance(r, str) else r for r in of_text]
            ).astype(np.int32)
            for of_text in runs
        ]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for.

        Raises:
            ValueError: an id that is negative or not below `size`.
        """
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.size):
            raise ValueError(f"ids from {min(ids)} to {max(ids)}: this tokenizer has 0 to {self.size - 1}")
        return b"".join([self.pieces[i] for i in ids])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives the same tokenizer."""
        return {"andrea_jax_tokenizer": 1, "kind": self.kind, **self.recipe}

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Tokenizer:
        """The tokenizer that `to_dict` described.

        Raises:
            UserError: not such a description.
        """
        from andrea_jax.data.bpe import bpe_tokenizer
        from andrea_jax.data.hf_tokenizer import hf_tokenizer

        kinds: dict[str, Callable[..., Tokenizer]]
        kinds = {"bytes": bytes_tokenizer, "chars": chars_tokenizer, "bpe": bpe_tokenizer, "hf": hf_tokenizer}
        recipe = {key: value for key, value in saved.items() if key not in ("andrea_jax_tokenizer", "kind")}
        try:
            return kinds[saved["kind"]](**recipe)
        except (KeyError, TypeError):
            raise UserError(f"not a tokenizer of andrea_jax: fields {', '.join(saved)}") from None

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON, whole or not at all."""
        write_file(Path(path), json.dumps(self.to_dict()).encode())

    def _runs(self, text: str | bytes) -> list[str | np.ndarray]:
        """Valid Unicode as str, and between it the ids of the bytes that are not UTF-8."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        try:
            return [data.decode()] if data else []
        except UnicodeDecodeError as error:
            if self.byte_ids is None and self.kind == "chars":
                raise UserError(
                    f"byte 0x{data[error.start]:02x} is not UTF-8 text, and this tokenizer has characters only; "
                    "set data.byte_fallback = True"
                ) from None
        if self.byte_ids is None:
            return [data.decode("utf-8", "replace")]
        parts = re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))
        stray = [self.byte_ids[np.frombuffer(p.encode("utf-8", "surrogateescape"), np.uint8)] for p in parts[1::2]]
        runs: list[str | np.ndarray] = [*parts]
        runs[1::2] = stray
        return [run for run in runs if len(run)]


def bytes_tokenizer() -> Tokenizer:
    """Each byte is its own id; BOS is 256. Size 257."""

    def encode_texts(texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    return Tokenizer("bytes", BOS, (*BYTES, b""), {}, encode_texts, np.arange(256, dtype=np.int32))


def chars_tokenizer(characters: str, byte_fallback: bool = True) -> Tokenizer:
    """An id for each of `characters`, sorted: from 257 on behind bytes and BOS, or from 0 on alone, without a BOS."""
    characters = "".join(sorted(set(characters)))
    codes = np.array([ord(c) for c in characters], np.uint32)
    first = BOS + 1 if byte_fallback else 0

    def encode_text(text: str) -> np.ndarray:
        text_codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        found = np.minimum(np.searchsorted(codes, text_codes), max(len(codes) - 1, 0))
        known = codes[found] == text_codes if len(codes) else np.zeros(len(text), bool)
        if known.all():
            return (found + first).astype(np.int32)
        if not byte_fallback:
            raise UserError(
                f"the character {text[int(np.argmin(known))]!r} is not among this tokenizer's {len(codes)}; "
                "set data.byte_fallback = True, or leave it out of the text"
            )
        parts, start = [], 0
        for at in map(int, np.flatnonzero(~known)):
            parts += [found[start:at] + first, np.frombuffer(text[at].encode(), np.uint8)]
            start = at + 1
        return np.concatenate([*parts, found[start:] + first]).astype(np.int32)

    recipe = {"characters": characters, "byte_fallback": byte_fallback}
    pieces = (*((*BYTES, b"") if byte_fallback else ()), *(c.encode() for c in characters))
    byte_ids = np.arange(256, dtype=np.int32) if byte_fallback else None
    return Tokenizer(
        "chars", BOS if byte_fallback else None, pieces, recipe, lambda texts: [*map(encode_text, texts)], byte_ids
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a file that `Tokenizer.save` or Hugging Face tokenizers wrote.

    Raises:
        UserError: no such file, or neither of the two.
    """
    from andrea_jax.data.hf_tokenizer import hf_tokenizer

    try:
        text = Path(path).read_text(encoding="utf-8")
        saved = json.loads(text)
    except OSError as error:
        raise UserError(f"{path}: no tokenizer can be read there: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not a tokenizer.json (not JSON)") from None
    if isinstance(saved, dict) and "andrea_jax_tokenizer" in saved:
        return Tokenizer.from_dict(saved)
    if not isinstance(saved, dict) or "model" not in saved:
        raise UserError(f"{path}: not a tokenizer.json: it has no 'model'")
    return hf_tokenizer(text)
