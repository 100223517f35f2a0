"""Tiny Shakespeare: 1,115,394 characters, the usual corpus of first character-level experiments."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from pathlib import Path

from andrea_jax.files import write_file
from andrea_jax.settings import UserError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def tinyshakespeare(folder: Path) -> Path:
    """`folder/tinyshakespeare.txt`, downloaded once if it is not there; its SHA-256 is checked.

    Raises:
        UserError: no network, or another text; says where to put the file.
    """
    path = folder / "tinyshakespeare.txt"
    if path.exists():
        if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
            raise UserError(f"{path}: not the known text (its SHA-256 should start with {SHA256[:16]}); delete it")
        return path
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            text = response.read(2**21)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"tinyshakespeare: no download ({error});\nput {URL} at {path}") from None
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise UserError(f"tinyshakespeare: the download is not the known text;\nput {URL} at {path}")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path
