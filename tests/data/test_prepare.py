import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sample_text import random_text

from andrea_jax.data import learn
from andrea_jax.data.config import DataConfig
from andrea_jax.data.prepare import prepare
from andrea_jax.data.readers import Chunk
from andrea_jax.data.shards import open_tokenizer, open_tokens, read_manifest
from andrea_jax.data.split import cut_documents, document_hash, hash_threshold
from andrea_jax.settings import UserError

UNIT = 10_000


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(random_text(100_000), encoding="utf-8")
    return path


def config_of(path, prepared="prepared", **fields):
    return DataConfig(
        **{"path": str(path), "prepared": str(Path(path).parent / prepared), "piece_bytes": 1000, **fields}
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def read_text(folder, split):
    return open_tokenizer(folder).decode(open_tokens(folder, split).read(0, 10**9))


def start(config, vocab_size, processes, wait):
    """prepare() in a process of its own that rests `wait` seconds after each unit."""
    script = (
        "import json, sys, time\n"
        "from andrea_jax.data.config import DataConfig\n"
        "from andrea_jax.data.prepare import prepare\n"
        "fields, vocab_size, processes, unit, wait = json.loads(sys.argv[1])\n"
        "def rest(stage, *_):\n"
        "    time.sleep(wait if stage == 'encode' else 0)\n"
        "if __name__ == '__main__':\n"
        "    print(prepare(DataConfig(**fields), vocab_size, rest, processes, unit))\n"
    )
    arguments = json.dumps([dataclasses.asdict(config), vocab_size, processes, UNIT, wait])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, "-c", script, arguments], env=env, stdout=subprocess.PIPE)


def test_every_document_is_kept_once_in_order_on_the_side_its_hash_gives(text_file):
    folder = prepare(config_of(text_file, validation=0.2), 400, unit_bytes=UNIT)
    pieces = [*cut_documents([Chunk(text_file.read_bytes(), True)], 1000)]
    threshold = hash_threshold(0.2)
    for split, validates in (("train", False), ("validation", True)):
        tokens, tokenizer = open_tokens(folder, split), open_tokenizer(folder)
        ids = tokens.read(0, len(tokens))
        starts = np.flatnonzero(ids == tokenizer.bos)
        documents = [tokenizer.decode(part) for part in np.split(ids, starts)[1:]]
        assert starts[0] == 0
        assert documents == [piece for piece in pieces if (document_hash(piece) < threshold) == validates]


def test_a_second_call_returns_at_once_and_other_settings_get_another_folder(text_file):
    calls = []
    folder = prepare(config_of(text_file), 400, lambda *a: calls.append(a))
    assert folder.name.startswith("corpus.txt-")
    assert calls
    calls.clear()
    assert prepare(config_of(text_file), 400, lambda *a: calls.append(a)) == folder
    assert not calls
    others = [
        prepare(config_of(text_file), 401),
        prepare(config_of(text_file, validation=0.1), 400),
        prepare(config_of(text_file, piece_bytes=999), 400),
        prepare(config_of(text_file, split="tail"), 400),
        prepare(config_of(text_file, tokenizer="bytes"), 400),
    ]
    os.utime(text_file, (1, 1))
    others.append(prepare(config_of(text_file), 400))
    assert len({folder, *others}) == 7
    assert prepare(config_of(text_file, tokenizer="bytes")) == prepare(config_of(text_file, tokenizer="bytes"), 300)


def test_settings_of_reading_do_not_change_the_folder(text_file):
    assert prepare(config_of(text_file), 400) == prepare(config_of(text_file, mask_documents=True, workers=7), 400)


def test_a_prepared_folder_is_taken_as_it_is(text_file, tmp_path):
    folder = prepare(config_of(text_file), 400)
    assert prepare(config_of(folder, prepared="elsewhere")) == folder
    assert not (folder.parent / "elsewhere").exists()
    with pytest.raises(UserError, match=r"vocab_size = 300, but the tokenizer \(bpe\) makes 332 ids"):
        prepare(config_of(folder), 300)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_prepare_goes_on_and_ends_bit_equal_to_one_that_was_not_killed(text_file, processes):
    whole = contents(prepare(config_of(text_file, "whole"), 400, unit_bytes=UNIT))
    process = start(config_of(text_file), 400, processes, wait=0.5)
    records = lambda: sorted((text_file.parent / "prepared").glob("*/unit-*.json"))  # noqa: E731
    try:
        deadline = time.monotonic() + 60
        while len(records()) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    folder = records()[0].parent
    assert not (folder / "manifest.json").exists()
    time.sleep(0.5 if processes > 1 else 0)  # workers see that their parent is gone
    done = {path: path.stat().st_mtime_ns for path in folder.glob("train-*.bin")}
    kept = [folder / f"train-{record.stem[-5:]}.bin" for record in records()]
    assert 3 <= len(kept) < len([name for name in whole if name.startswith("train-")])
    (folder / "train-00099.bin.1.tmp").write_bytes(b"half a sh")
    assert prepare(config_of(text_file), 400, processes=1, unit_bytes=UNIT) == folder
    assert contents(folder) == whole
    assert all(path.stat().st_mtime_ns == done[path] for path in kept)


def test_two_processes_make_the_same_bytes_as_one(text_file):
    one = prepare(config_of(text_file, "one"), 400, unit_bytes=UNIT)
    two = prepare(config_of(text_file, "two"), 400, processes=2, unit_bytes=UNIT)
    assert contents(one) == contents(two)
    assert len(contents(one)) > 15


def test_two_prepares_of_the_same_corpus_at_once_both_get_the_whole_folder(text_file):
    both = [start(config_of(text_file), 400, 1, wait=0.02) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert contents(Path(folders.pop())) == contents(prepare(config_of(text_file, "alone"), 400, unit_bytes=UNIT))


def test_the_tail_is_the_last_share_of_the_bytes_and_is_not_cut_into_pieces(text_file):
    text = text_file.read_bytes()
    folder = prepare(config_of(text_file, tokenizer="bytes", split="tail", validation=0.1), unit_bytes=UNIT)
    train, validation = read_text(folder, "train"), read_text(folder, "validation")
    assert train + validation == text
    assert 0 <= int(len(text) * 0.9) - len(train) < 4
    ids = np.concatenate([open_tokens(folder, split).read(0, 10**9) for split in ("train", "validation")])
    assert (ids == 256).sum() == 1


def test_the_tail_of_rows_is_found_by_reading(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"row {i:03}"}) + "\n" for i in range(100)))
    folder = prepare(config_of(tmp_path / "a.jsonl", tokenizer="bytes", split="tail", validation=0.25))
    assert read_text(folder, "validation") == b"".join(b"row %03d" % i for i in range(75, 100))


def test_characters_alone_make_one_token_a_character(text_file):
    config = config_of(text_file, tokenizer="chars", byte_fallback=False, split="tail", validation=0.1)
    folder = prepare(config, 100)
    text = text_file.read_text(encoding="utf-8")
    manifest = read_manifest(folder)
    assert manifest["tokenizer"] == {"kind": "chars", "size": len(set(text)), "bos": None}
    assert sum(counts["tokens"] for counts in manifest["splits"].values()) == len(text)


def test_a_tokenizer_file_can_be_used_for_another_corpus(text_file, tmp_path):
    first = prepare(config_of(text_file), 400)
    (tmp_path / "other.txt").write_text(random_text(20_000, seed=1), encoding="utf-8")
    second = prepare(config_of(tmp_path / "other.txt", tokenizer=str(first / "tokenizer.json")), 400)
    assert open_tokenizer(second).to_dict() == open_tokenizer(first).to_dict()


def test_where_the_hash_leaves_a_side_empty_one_document_is_moved_there(tmp_path):
    rows = [f"document {i}" for i in range(6)]
    by_hash = sorted(rows, key=lambda row: document_hash(row.encode()))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    low = prepare(config_of(tmp_path / "a.jsonl", tokenizer="bytes", validation=1e-9))
    assert read_text(low, "validation").decode() == by_hash[0]
    assert read_text(low, "train").decode() == "".join(row for row in rows if row != by_hash[0])
    below = [row for row in rows if document_hash(row.encode()) < hash_threshold(0.5)]
    assert len(below) >= 2
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in below))
    high = prepare(config_of(tmp_path / "b.jsonl", tokenizer="bytes", validation=0.5))
    assert read_text(high, "train").decode() == max(below, key=by_hash.index)


@pytest.mark.parametrize("split", ["hash", "tail"])
def test_too_little_text_is_refused(tmp_path, split):
    for text, match in (("", "there is no text in it"), ("x", "all alike|too little text")):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(UserError, match=match):
            prepare(config_of(tmp_path / "a.txt", tokenizer="bytes", split=split))
    assert not [*(tmp_path / "prepared").glob("*/manifest.json")]


def test_a_tokenizer_that_does_not_fit_or_does_not_exist_is_refused(text_file):
    with pytest.raises(UserError, match=r"vocab_size = 100, but the tokenizer \(bytes\) makes 257 ids"):
        prepare(config_of(text_file, tokenizer="bytes"), 100)
    with pytest.raises(UserError, match="vocab_size = 100: bpe needs at least 257"):
        prepare(config_of(text_file), 100)
    with pytest.raises(UserError, match=r"data.tokenizer = 'byts': there is no such file; did you mean bytes\?"):
        prepare(config_of(text_file, tokenizer="byts"))


def test_a_place_that_cannot_hold_the_folder_is_refused(text_file):
    with pytest.raises(UserError, match=r"data.prepared = '.*corpus.txt': no folder can be made: Not a directory"):
        prepare(config_of(text_file, prepared="corpus.txt"), 400)


def test_binary_files_that_a_folder_skipped_are_in_the_manifest(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(random_text(5000), encoding="utf-8")
    (tmp_path / "texts" / "b.png").write_bytes(b"\x89PNG\0")
    folder = prepare(config_of(tmp_path / "texts", tokenizer="bytes"))
    assert read_manifest(folder)["skipped_files"] == [str(tmp_path / "texts" / "b.png")]


def test_progress_counts_bytes_up_to_the_total_and_tokens(text_file):
    calls = []
    folder = prepare(config_of(text_file), 400, lambda *a: calls.append(a), unit_bytes=UNIT)
    size = text_file.stat().st_size
    tokens = sum(counts["tokens"] for counts in read_manifest(folder)["splits"].values())
    assert [call[0] for call in calls] == sorted((call[0] for call in calls), reverse=True)  # survey, then encode
    assert next(call for call in reversed(calls) if call[0] == "survey") == ("survey", size, size, 0)
    assert calls[-1] == ("encode", size, size, tokens)
    done = [call[1] for call in calls if call[0] == "encode"]
    assert done == sorted(done)
    assert len(done) > 5


def test_the_tokenizers_sample_is_bounded_spread_over_the_corpus_and_in_order():
    texts = [f"{i:04}".encode() * 5 for i in range(1000)]
    chosen = learn.sample(texts, 4000)
    assert 1000 <= sum(map(len, chosen)) <= 4000
    numbers = [int(text[:4]) for text in chosen]
    assert numbers == sorted(numbers)
    assert all(np.histogram(numbers, 4, (0, 1000))[0] > 10)
    assert learn.sample(texts, 10**6) == texts
    assert [*learn.first_bytes(texts, 45)] == texts[:2]


def test_bpe_learns_from_training_text_only(tmp_path):
    def first_on(side, texts):
        return next(text for text in texts if (document_hash(text.encode()) < hash_threshold(0.5)) == side)

    validates = first_on(True, (f"zqzq zqzq zqzq {i}" for i in range(99)))
    trains = first_on(False, (f"plain plain plain {i}" for i in range(99)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (validates, trains)))
    pieces = open_tokenizer(prepare(config_of(tmp_path / "a.jsonl", validation=0.5), 300)).pieces
    assert b"plain" in pieces
    assert b"zq" not in pieces
