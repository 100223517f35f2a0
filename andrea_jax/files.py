"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from andrea_jax.settings import UserError


def write_file(path: Path, content: bytes | memoryview) -> None:
    """All of it or nothing: written under a temporary name, flushed to the disk, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside it, renamed to `path` when the context is left, or removed by an error.

    Raises:
        UserError: `path` is there already and not an empty folder.
    """
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    if path.exists():
        raise UserError(f"{path} is there already; choose another folder, or move it away")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
