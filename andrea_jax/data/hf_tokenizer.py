"""Any tokenizer.json of the Hugging Face tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from andrea_jax.data.bpe import byte_letters
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.settings import UserError

BOS_NAMES = ("<|endoftext|>", "<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>")


def hf_tokenizer(definition: str, bos: int | None = None, ends: Sequence[int] = ()) -> Tokenizer:
    """From the text of a tokenizer.json. Marks (special tokens) in a text are read as text, and decode to b"".

    `bos` is the id that begins a document, by default that of the first of BOS_NAMES; `ends` are ids that end one.

    Byte-level without a normalizer or prefix space: decode(encode(text)) == text for any bytes. Others keep of UTF-8
    text what their normalizer keeps; SentencePiece and WordPiece forms may add a space at the start; bytes that are
    not UTF-8 become U+FFFD unless there are <0xNN> ids.

    Raises:
        UserError: the library cannot read it.
    """
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer.json: {str(error).splitlines()[0]}") from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    vocabulary = library.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    spell = _speller(json.loads(definition))
    added = library.get_added_tokens_decoder()
    for text, i in vocabulary.items():
        if i in added:
            pieces[i] = b"" if added[i].special else added[i].content.encode()
        else:
            pieces[i] = spell(text)
    recipe: dict[str, Any] = {"definition": definition}
    recipe |= ({} if bos is None else {"bos": bos}) | ({"ends": list(ends)} if ends else {})
    if bos is None:
        bos = next((vocabulary[name] for name in BOS_NAMES if name in vocabulary), None)
    if bos is not None:
        pieces[bos] = b""

    def encode_texts(texts: list[str]) -> list[Any]:
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer("hf", bos, tuple(pieces), recipe, encode_texts, _byte_ids(vocabulary), tuple(ends))


def _parts(node: Any) -> list[dict[str, Any]]:
    """A component and the members of a Sequence in it."""
    if not node:
        return []
    members = node.get("decoders") or node.get("pretokenizers") or []
    return [node] + [part for member in members for part in _parts(member)]


def _speller(config: dict[str, Any]):
    """token string -> the bytes it stands for."""
    parts = _parts(config.get("decoder")) + _parts(config.get("pre_tokenizer"))
    types = {part["type"]: part for part in parts}
    if "ByteLevel" in types:
        values = {letter: byte for byte, letter in enumerate(byte_letters())}
        return lambda text: bytes(values[c] for c in text) if all(c in values for c in text) else text.encode()
    if "WordPiece" in types:
        prefix = types["WordPiece"].get("prefix", "##")
        return lambda text: (text.removeprefix(prefix) if text.startswith(prefix) else " " + text).encode()

    def spell(text: str) -> bytes:
        if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    return spell


def _byte_ids(vocabulary: dict[str, int]) -> np.ndarray | None:
    for names in (byte_letters(), [f"<0x{byte:02X}>" for byte in range(256)]):
        if all(name in vocabulary for name in names):
            return np.array([vocabulary[name] for name in names], np.int32)
    return None
