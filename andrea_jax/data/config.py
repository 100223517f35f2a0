"""Where text comes from and how it becomes token windows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from andrea_jax.settings import check_fields, setting


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer, split and windows."""

    SECTION: ClassVar[str] = "data"
    path: str = setting(
        "python_docs",
        "text file, folder, glob, .jsonl, .gz, .zst, .parquet (several: a,b), a prepared folder,"
        " or a name: python_docs, tinyshakespeare, hf:NAME[@CONFIG][:SPLIT]",
    )
    field: str = setting("text", "field of .jsonl, .parquet and Hugging Face rows that holds the text")
    tokenizer: str = setting("bpe", "bpe (trained on the corpus), bytes, chars, or the path of a tokenizer.json")
    byte_fallback: bool = setting(True, "chars: 256 bytes and BOS beside the characters, so any text can be encoded")
    split: Literal["hash", "tail"] = setting("hash", "validation: documents chosen by hash, or the end of the corpus")
    validation: float = setting(0.05, "share of the corpus kept for validation", above=0, at_most=0.5)
    piece_bytes: int = setting(
        4096, "split by hash: longer documents are cut at line ends into pieces; 0: never", at_least=0
    )
    mask_documents: bool = setting(False, "documents packed into one window cannot attend to each other")
    workers: int = setting(1, "threads that read batches ahead", at_least=1)
    prepared: str = setting("prepared", "folder for token shards")

    def __post_init__(self) -> None:
        check_fields(self)
