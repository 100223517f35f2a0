import os

import pytest

from andrea_jax.files import new_folder, write_file
from andrea_jax.settings import UserError


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b"

    def fail():
        with new_folder(path) as folder:
            (folder / "x").write_text("1")
            assert not path.exists()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list((tmp_path / "a").iterdir()) == []
    path.mkdir()  # an empty folder may be there
    with new_folder(path) as folder:
        (folder / "x").write_text("2")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert (path / "x").read_text() == "2"


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UserError, match="is there already"), new_folder(tmp_path):
        pass
    assert (tmp_path / "x").read_text() == "mine"
