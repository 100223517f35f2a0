"""A corpus by name or path: which documents there are, in which order, streamed."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from andrea_jax.data.config import DataConfig
from andrea_jax.data.python_docs import python_docs, source_files
from andrea_jax.data.readers import PACKED, Chunk, kind, looks_binary, need, read_file, row_text
from andrea_jax.data.tinyshakespeare import tinyshakespeare
from andrea_jax.settings import UserError

NAMES = ("python_docs", "tinyshakespeare", "hf:NAME")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What to read, and what it is recognised by."""

    name: str  # readable, fit for a folder name
    read: Callable[[], Iterator[Chunk]]  # from the start, in the same order each time
    identity: Any  # JSON-able; changes when the content may have changed
    text_bytes: int | None = None  # exact size of the text, where known without reading it
    remote: bool = False  # each reading goes over the network
    skipped: tuple[str, ...] = ()  # binary files in folders


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config.path` names.

    Raises:
        UserError: no such path, no text in it, a binary file, a package that is missing.
    """
    path = config.path
    if path == "python_docs":
        identity = [path, sys.version, [_stamp(file) for _, file in source_files()]]
        return Corpus(path, lambda: (Chunk(text, True) for text in python_docs()), identity)
    if path == "tinyshakespeare":
        return _of_files(path, (tinyshakespeare(Path(config.prepared)),), (), config.field)
    if path.startswith("hf:"):
        return _hugging_face(path, config.field)
    name = re.sub(r"[^\w.-]+", "_", Path(path).expanduser().absolute().name)[:40].strip("._") or "corpus"
    return _of_files(name, *find_files(path), config.field)


def find_files(path: str) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """(files to read, binary files skipped) of a file, folder or glob, or of several with commas between them.

    Folders are searched to any depth in sorted order, without hidden names. A binary file is skipped in a folder or
    glob and refused when it is named.

    Raises:
        UserError: a part that does not exist, cannot be read, or is binary.
    """
    named, found = [], []
    for part in [path] if os.path.exists(os.path.expanduser(path)) else path.split(","):
        part = os.path.expanduser(part.strip())
        if not part:
            raise UserError(f"data.path = {path!r}: a name is empty")
        if os.path.isdir(part):
            found += [Path(name) for name in _walk(part)]
        elif os.path.exists(part):
            named.append(Path(part))
            found.append(Path(part))
        elif glob.has_magic(part):
            matches = [Path(name) for name in sorted(glob.glob(part, recursive=True)) if os.path.isfile(name)]
            if not matches:
                raise UserError(f"data.path = {path!r}: no file matches {part}")
            found += matches
        else:
            raise UserError(f"data.path = {path!r}: {_nothing_at(Path(part))}")
    binary = {file for file in found if looks_binary(file)}
    for file in named:
        if file in binary:
            raise UserError(f"{file}: has NUL bytes, so it is not UTF-8 text; give a text, .jsonl or .parquet file")
    return tuple(file for file in found if file not in binary), tuple(sorted(map(str, binary)))


def _walk(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    found = []
    for parent, subfolders, files in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in files if not name.startswith(".")]
    return sorted(name for name in found if os.path.isfile(name))


def _nothing_at(path: Path) -> str:
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    names = os.listdir(missing.parent) if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, [*names, *NAMES], n=1)
    where = Path() if close and close[0] in NAMES else missing.parent
    hint = (
        f"did you mean {where / close[0]}?" if close else f"give a file, folder or glob, or one of {', '.join(NAMES)}"
    )
    return f"there is no {missing}; {hint}"


def _of_files(name: str, files: tuple[Path, ...], skipped: tuple[str, ...], field: str) -> Corpus:
    def read() -> Iterator[Chunk]:
        for file in files:
            yield from read_file(file, field)

    plain = all(not kind(file) and file.suffix.lower() not in PACKED for file in files)
    total = sum(file.stat().st_size for file in files) if plain else None
    rows = field if any(map(kind, files)) else None
    return Corpus(name, read, [rows, [_stamp(file) for file in files]], total, skipped=skipped)


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return str(file.absolute()), status.st_size, status.st_mtime_ns


def _hugging_face(path: str, field: str) -> Corpus:
    match = re.fullmatch(r"hf:([^@:]+)(?:@([^@:]+))?(?::([^@:]+))?", path)
    if not match:
        raise UserError(
            f"data.path = {path!r}: expected hf:NAME[@CONFIG][:SPLIT], as in hf:wikitext@wikitext-2-v1:train"
        )
    name, variant, split = match[1], match[2], match[3] or "train"
    try:
        import datasets
    except ImportError:
        raise need("datasets", "hf", f"data.path = {path!r}") from None

    def read() -> Iterator[Chunk]:
        try:
            rows = datasets.load_dataset(name, variant, split=split, streaming=True)
        except Exception as error:  # it raises types of many packages: no such name, config, split or network
            raise UserError(
                f"data.path = {path!r}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            ) from None
        for number, row in enumerate(rows):
            if text := row_text(row, field, f"{path}: row {number}"):
                yield Chunk(text, True)

    return Corpus(re.sub(r"\W+", "_", path), read, [path, split, field], remote=True)
