"""Files as documents, in chunks, so that no file has to fit in memory."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from andrea_jax.settings import UserError, nearest

CHUNK_BYTES = 2**20
PACKED = (".gz", ".zst")
ROWS = (".jsonl", ".ndjson", ".parquet")


class Chunk(NamedTuple):
    """Up to about CHUNK_BYTES of one document; `first` marks where a document starts."""

    text: bytes
    first: bool


def kind(path: Path) -> str:
    """The suffix that says how a file is read: `.jsonl`, `.ndjson`, `.parquet`, or `` for text."""
    inner = path.with_suffix("") if path.suffix.lower() in PACKED else path
    suffix = inner.suffix.lower()
    return suffix if suffix in ROWS else ""


def read_file(path: Path, field: str) -> Iterator[Chunk]:
    """The documents of one file: the whole of a text file, or each row's `field`.

    Raises:
        UserError: naming the file (and row) that cannot be read, and why.
    """
    try:
        if kind(path) == ".parquet":
            yield from _parquet(path, field)
            return
        with open_stream(path) as stream:
            yield from _jsonl(stream, path, field) if kind(path) else _text(stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged or cut off: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def open_stream(path: Path) -> IO[bytes]:
    """A binary stream of the file's content, unpacked."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(_Zstandard(path), CHUNK_BYTES)
    return open(path, "rb")


def looks_binary(path: Path) -> bool:
    """True if there are NUL bytes at the start of what should be text (UTF-16 counts as binary)."""
    if kind(path) == ".parquet":
        return False
    try:
        with open_stream(path) as stream:
            return b"\0" in stream.read(4096)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged or cut off: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def character_start(data: bytes, at: int) -> int:
    """The start of the UTF-8 character that byte `at` lies in; `at` itself where that is not UTF-8."""
    for start in range(at, max(at - 4, -1), -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return at


def text_of(value: Any) -> bytes:
    """UTF-8 of a row's text. Bytes and surrogates that are not Unicode are kept."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def need(package: str, extra: str, what: str) -> UserError:
    """The error for an optional package that is not installed."""
    return UserError(f"{what} needs {package}: pip install 'andrea_jax[{extra}]' (or: pip install {package})")


def row_text(row: Any, field: str, where: str) -> bytes:
    """The text of one row.

    Raises:
        UserError: `where`, and what the row has instead.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, expected an object with the field {field!r}")
    if field not in row:
        raise UserError(f"{where}: no field {field!r}{nearest(field, row)} (set data.field)")
    if not isinstance(row[field], str):
        raise UserError(f"{where}: field {field!r} holds a {type(row[field]).__name__}, expected text")
    return text_of(row[field])


def _text(stream: IO[bytes]) -> Iterator[Chunk]:
    rest, first = b"", True
    while block := stream.read(CHUNK_BYTES):
        data = rest + block
        cut = data.rfind(b"\n") + 1 or character_start(data, len(data) - 1)
        if cut:
            yield Chunk(data[:cut], first)
            first = False
        rest = data[cut:]
    if rest:
        yield Chunk(rest, first)


def _jsonl(stream: IO[bytes], path: Path, field: str) -> Iterator[Chunk]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8", "surrogateescape"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        if text := row_text(row, field, f"{path}:{number}"):
            yield Chunk(text, True)


def _parquet(path: Path, field: str) -> Iterator[Chunk]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise need("pyarrow", "data", f"{path}: reading .parquet") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise UserError(f"{path}: no column {field!r}{nearest(field, names)} (set data.field)")
            numbers = itertools.count(1)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value, number in zip(batch.column(0).to_pylist(), numbers, strict=False):
                    if text := row_text({field: value}, field, f"{path}: row {number}"):
                        yield Chunk(text, True)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from None


class _Zstandard(io.RawIOBase):
    """A .zst file as a raw stream. The library's own reader takes a file that ends inside a frame for complete."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise need("zstandard", "data", f"{path}: reading .zst") from None
        self._error = zstandard.ZstdError
        self._frames = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame: Any = None  # None between two frames
        self._file = open(path, "rb")  # noqa: SIM115 (closed in close)
        self._packed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(2**16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            self._unpack()
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _unpack(self) -> None:
        self._frame = self._frame or self._frames.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._packed))
        except self._error as error:
            raise EOFError(str(error)) from None
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        self._file.close()
        super().close()
