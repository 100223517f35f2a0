import os

import pytest

from andrea_jax.files import write_file


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
