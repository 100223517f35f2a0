"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, content: bytes | memoryview) -> None:
    """All of it or nothing: written under a temporary name, flushed to the disk, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
