import json

import numpy as np
import pytest
from sample_text import random_text

from andrea_jax.data import shards
from andrea_jax.data.config import DataConfig
from andrea_jax.data.prepare import prepare
from andrea_jax.data.shards import (
    check_vocabulary,
    open_tokenizer,
    open_tokens,
    read_manifest,
    token_dtype,
    tokens_in_memory,
    write_shard,
)
from andrea_jax.settings import UserError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text(random_text(30_000), encoding="utf-8")
    config = DataConfig(
        path=str(tmp_path / "a.txt"), tokenizer="bytes", prepared=str(tmp_path / "prepared"), piece_bytes=500
    )
    return prepare(config, unit_bytes=5000)


def test_the_dtype_is_the_smallest_that_holds_every_id(tmp_path):
    for size, dtype in ((257, "<u2"), (65_536, "<u2"), (65_537, "<u4")):
        assert token_dtype(size) == np.dtype(dtype)
        ids = np.array([0, size - 1], np.int32)
        entry = write_shard(tmp_path / "x.bin", ids, token_dtype(size))
        assert (entry["tokens"], entry["max_token"]) == (2, size - 1)
        np.testing.assert_array_equal(np.fromfile(tmp_path / "x.bin", dtype), ids)


def test_reads_join_across_shards(folder):
    tokens = open_tokens(folder, "train")
    assert len(tokens.shards) > 3
    files = [entry["file"] for entry in read_manifest(folder)["shards"] if entry["split"] == "train"]
    expected = np.concatenate([np.fromfile(folder / name, "<u2") for name in files])
    edge = len(tokens.shards[0])
    spans = [(0, len(tokens)), (edge - 1, edge + 1), (edge, edge + 1), (3, 3), (edge - 2, len(tokens) - 1), (5, 10**9)]
    for start, stop in spans:
        ids = tokens.read(start, stop)
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, expected[start:stop])


def test_a_split_in_memory_reads_like_one_on_disk(folder):
    tokens = open_tokens(folder, "validation")
    copy = tokens_in_memory(tokens.read(0, len(tokens)))
    assert len(copy) == len(tokens) > 100
    np.testing.assert_array_equal(copy.read(7, 99), tokens.read(7, 99))


def test_the_manifest_counts_what_the_files_hold(folder):
    manifest, tokenizer = read_manifest(folder), open_tokenizer(folder)
    total = 0
    for split in ("train", "validation"):
        ids = open_tokens(folder, split).read(0, 10**9)
        counts = manifest["splits"][split]
        assert counts["tokens"] == len(ids) == counts["bytes"] + counts["documents"]
        assert counts["documents"] == (ids == tokenizer.bos).sum()
        assert counts["bytes"] == len(tokenizer.decode(ids))
        total += counts["bytes"]
    assert total == len(random_text(30_000).encode())
    assert manifest["tokenizer"] == {"kind": "bytes", "size": 257, "bos": 256}
    assert manifest["max_token"] == 256


def last_shard(folder):
    return folder / [entry["file"] for entry in read_manifest(folder)["shards"] if entry["split"] == "train"][-1]


def test_a_shard_that_is_cut_off_or_missing_is_refused_by_name(folder):
    path = last_shard(folder)
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(
        UserError, match=rf"{path.name}: has {len(content) - 2:,} bytes, expected {len(content):,} bytes"
    ):
        open_tokens(folder, "train")
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name}: is missing"):
        open_tokens(folder, "train")
    assert len(open_tokens(folder, "validation")) > 0


@pytest.mark.parametrize("large", [False, True])
def test_an_altered_shard_is_refused_by_name_at_open_or_where_it_is_large_when_first_read(folder, monkeypatch, large):
    path = last_shard(folder)
    content = bytearray(path.read_bytes())
    content[4] ^= 1
    path.write_bytes(content)
    if not large:
        with pytest.raises(UserError, match=rf"{path.name}: its content was altered"):
            open_tokens(folder, "train")
        return
    monkeypatch.setattr(shards, "CHECKED_AT_OPEN", 0)
    tokens = open_tokens(folder, "train")
    assert len(tokens.read(0, 100)) == 100
    with pytest.raises(UserError, match=rf"{path.name}: its content was altered"):
        tokens.read(len(tokens) - 5, len(tokens))
    assert len(tokens.unchecked) == len(tokens.shards) - 1  # the first was checked, once


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_both_numbers(folder):
    check_vocabulary(read_manifest(folder), 257)
    with pytest.raises(UserError, match=r"vocab_size = 256, but the tokenizer \(bytes\) makes 257 ids"):
        check_vocabulary(read_manifest(folder), 256)


def test_what_is_not_a_prepared_folder_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="not a prepared folder"):
        open_tokens(tmp_path, "train")
    with pytest.raises(UserError, match="expected train or validation"):
        open_tokens(folder, "test")
    manifest = read_manifest(folder)
    for content, match in (
        ("{", "damaged"),
        ("{}", "not token shards"),
        ({**manifest, "andrea_jax_shards": 0}, "format 1"),
    ):
        (folder / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UserError, match=match):
            open_tokens(folder, "train")
