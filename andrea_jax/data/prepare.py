"""A corpus becomes a folder of token shards, once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from andrea_jax.data.config import DataConfig
from andrea_jax.data.corpus import Corpus, open_corpus
from andrea_jax.data.encode import UNIT_BYTES, encode_corpus
from andrea_jax.data.learn import describe, make_tokenizer, tokenizer_identity
from andrea_jax.data.shards import FORMAT, SPLITS, check_vocabulary, read_manifest, token_dtype, write_json
from andrea_jax.data.split import (
    Piece,
    cut_documents,
    document_hash,
    hash_threshold,
    split_by_hash,
    split_tail,
    tail_start,
)
from andrea_jax.data.tokenizer import Tokenizer, load_tokenizer
from andrea_jax.settings import UserError

Progress = Callable[[str, int, int | None, int], None]


def prepare(
    config: DataConfig,
    vocab_size: int | None = None,
    progress: Progress | None = None,
    processes: int = 1,
    unit_bytes: int = UNIT_BYTES,
) -> Path:
    """The folder with the token shards of `config.path`; made now if it is not there. `vocab_size`: the model's.

    `progress(stage, bytes done, bytes in total or None, tokens)` has the stages "wait" (another process is at it),
    "survey" and "encode". A run that was killed goes on where it stopped; the files depend neither on that nor on
    `processes`.

    Raises:
        UserError: a corpus that cannot be read or split, a tokenizer that cannot be used, a vocabulary below its size.
    """
    if (given := Path(config.path) / "manifest.json").exists() and b"andrea_jax_shards" in given.read_bytes():
        folder = given.parent
    else:
        corpus = open_corpus(config)
        rule = [config.split, config.validation, config.piece_bytes if config.split == "hash" else None]
        facts = json.dumps([FORMAT, corpus.identity, tokenizer_identity(config, vocab_size), rule, unit_bytes])
        fingerprint = hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()
        folder = Path(config.prepared) / f"{corpus.name}-{fingerprint}"
        if not (folder / "manifest.json").exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"data.prepared = {config.prepared!r}: no folder can be made: {error.strerror}"
                ) from None
            job = _Job(folder, corpus, config, vocab_size, progress or (lambda *_: None), processes, unit_bytes)
            with _lock(job):
                if not (folder / "manifest.json").exists():
                    _make(job)
    manifest = read_manifest(folder)
    if vocab_size is not None:
        check_vocabulary(manifest, vocab_size)
    return folder


@dataclasses.dataclass(frozen=True)
class _Job:
    folder: Path
    corpus: Corpus
    config: DataConfig
    vocab_size: int | None
    progress: Progress
    processes: int
    unit_bytes: int

    def pieces(self, boundary: int) -> Iterator[Piece]:
        """The corpus from its start; `boundary` is a byte for the split by tail, a hash for that by hash."""
        if self.config.split == "tail":
            return split_tail(self.corpus.read(), boundary)
        return split_by_hash(cut_documents(self.corpus.read(), self.config.piece_bytes), boundary)


@dataclasses.dataclass
class _Seen:
    """What a pass over the pieces saw: how many, on which sides, and while there is one side only its hashes."""

    count: int = 0
    sides: set[bool] = dataclasses.field(default_factory=set)
    lowest: int = 2**64
    highest: int = -1

    def watch(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.count += 1
            self.sides.add(piece.validation)
            if len(self.sides) == 1:
                value = document_hash(piece.text)
                self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
            yield piece


def _make(job: _Job) -> None:
    for leftover in job.folder.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    total = _total_bytes(job)
    if job.config.split == "tail":
        boundary = tail_start(total or 0, job.config.validation)
    else:
        boundary = hash_threshold(job.config.validation)
    tokenizer = _tokenizer(job, boundary, total)
    shards, seen = _encode(job, tokenizer, boundary, total)
    if seen.sides != {False, True}:
        boundary = _other_boundary(job.config, seen)
        shards, _ = _encode(job, tokenizer, boundary, total)
    write_json(job.folder / "manifest.json", _manifest(job, tokenizer, boundary, shards))
    for record in job.folder.glob("unit-*.json"):
        record.unlink(missing_ok=True)


def _total_bytes(job: _Job) -> int | None:
    """Bytes of text, where known; counted by reading only where the start of a tail depends on it."""
    if job.corpus.text_bytes is not None or job.config.split == "hash":
        return job.corpus.text_bytes
    total = 0
    for chunk in job.corpus.read():
        total += len(chunk.text)
        job.progress("survey", total, None, 0)
    return total


def _tokenizer(job: _Job, boundary: int, total: int | None) -> Tokenizer:
    """Kept in the folder once it is made."""

    def watched() -> Iterator[Piece]:
        done = 0
        for piece in job.pieces(boundary):
            done += len(piece.text)
            job.progress("survey", done, total, 0)
            yield piece

    path = job.folder / "tokenizer.json"
    if not path.exists():
        make_tokenizer(job.config, job.vocab_size, watched, job.corpus.remote).save(path)
    tokenizer = load_tokenizer(path)
    if job.vocab_size is not None:
        check_vocabulary({"tokenizer": describe(tokenizer)}, job.vocab_size)
    return tokenizer


def _encode(job: _Job, tokenizer: Tokenizer, boundary: int, total: int | None) -> tuple[list[dict[str, Any]], _Seen]:
    seen = _Seen()
    done = tokens = 0
    shards = []
    pieces = seen.watch(job.pieces(boundary))
    for unit in encode_corpus(pieces, job.folder, tokenizer, boundary, job.processes, job.unit_bytes):
        shards += unit
        done += sum(shard["bytes"] for shard in unit)
        tokens += sum(shard["tokens"] for shard in unit)
        job.progress("encode", done, total, tokens)
    return shards, seen


def _other_boundary(config: DataConfig, seen: _Seen) -> int:
    """For few documents that the hash puts on one side: the lowest validates, or the highest trains."""
    if not seen.count:
        raise UserError(f"data.path = {config.path!r}: there is no text in it")
    if config.split == "tail":
        raise UserError(f"data.path = {config.path!r}: too little text for data.validation = {config.validation}")
    if seen.lowest == seen.highest:
        raise UserError(
            f"data.path = {config.path!r}: {seen.count} document(s), all alike, so there is none for validation;\n"
            "give it more text, set data.split = 'tail', or make data.piece_bytes smaller"
        )
    return seen.highest if seen.sides == {True} else seen.lowest + 1


def _manifest(job: _Job, tokenizer: Tokenizer, boundary: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    def total(split: str, count: str) -> int:
        return sum(shard[count] for shard in shards if shard["split"] == split)

    rule = {"rule": job.config.split, "validation": job.config.validation, "boundary": boundary}
    return {
        "andrea_jax_shards": FORMAT,
        "source": job.config.path,
        "skipped_files": job.corpus.skipped,
        "tokenizer": describe(tokenizer),
        "split": rule | ({"piece_bytes": job.config.piece_bytes} if job.config.split == "hash" else {}),
        "splits": {name: {c: total(name, c) for c in ("documents", "bytes", "tokens")} for name in SPLITS},
        "max_token": max(shard["max_token"] for shard in shards),
        "dtype": token_dtype(tokenizer.size).str,
        "shards": shards,
    }


@contextlib.contextmanager
def _lock(job: _Job) -> Iterator[None]:
    """One process at a time. Where a file system has no locks two may work: each writes the same bytes by renaming."""
    with open(job.folder / ".lock", "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                job.progress("wait", 0, None, 0)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
