import builtins
import gzip
import json
import sys
import sysconfig
import types
import urllib.request

import pytest
from sample_text import random_text

from andrea_jax.data import readers
from andrea_jax.data.config import DataConfig
from andrea_jax.data.corpus import open_corpus
from andrea_jax.data.python_docs import python_docs
from andrea_jax.data.split import cut_documents, document_hash, hash_threshold, split_by_hash, split_tail, tail_start
from andrea_jax.data.tinyshakespeare import tinyshakespeare
from andrea_jax.settings import UserError

ROWS = ["first", "second\nwith a line", "", "dernière"]
DOCUMENTS = [row.encode() for row in ROWS if row]


def documents(path, **fields):
    return [*cut_documents(open_corpus(DataConfig(path=str(path), **fields)).read(), 0)]


def jsonl(rows, field="text"):
    return "".join(json.dumps({field: row, "other": 1}) + "\n" for row in rows).encode()


def refused(path, match, **fields):
    with pytest.raises(UserError, match=match) as error:
        documents(path, **fields)
    assert str(error.value).count("\n") <= 1


def test_python_docs_are_megabytes_of_distinct_utf8_documents_in_a_fixed_order():
    docs = python_docs()
    assert sum(map(len, docs)) > 1_500_000
    assert len(set(docs)) == len(docs) > 300
    assert docs[0].startswith(b'The "assert" statement\n')
    json_doc = next(doc for doc in docs if doc.startswith(b"json\n\n"))
    assert b"\njson.dumps\n\nSerialize ``obj`` to a JSON formatted ``str``." in json_doc
    assert not any(b"\0" in doc or not doc.decode().strip() for doc in docs)
    python_docs.cache_clear()
    assert python_docs() == docs


def test_python_docs_without_sources_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    refused("python_docs", "came without .*py")


def test_python_docs_without_topics_are_refused(monkeypatch):
    python_docs.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    refused("python_docs", "came without pydoc_data.topics")


def test_text_is_kept_byte_by_byte_whatever_its_chunks(monkeypatch, tmp_path):
    data = b"\xef\xbb\xbfline one\r\n\xff\xfe broken\n" + "é日".encode() * 50 + b"\n\nno end"
    (tmp_path / "a.txt").write_bytes(data)
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr(readers, "CHUNK_BYTES", size)
        chunks = [*readers.read_file(tmp_path / "a.txt", "text")]
        assert b"".join(chunk.text for chunk in chunks) == data
        assert [chunk.first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_chunks_end_at_lines_and_never_inside_a_character(monkeypatch, tmp_path):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 100)
    (tmp_path / "a.txt").write_text(random_text(3000) + "日" * 500, encoding="utf-8")
    chunks = [chunk.text for chunk in readers.read_file(tmp_path / "a.txt", "text")]
    assert max(map(len, chunks)) < 300
    assert "".join(text.decode() for text in chunks) == random_text(3000) + "日" * 500


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet"])
def test_rows_are_documents_and_empty_ones_are_left_out(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"other": [1] * 4, "text": ROWS}), path)
    elif suffix.endswith("zst"):
        path.write_bytes(pytest.importorskip("zstandard").compress(jsonl(ROWS)))
    else:
        path.write_bytes(gzip.compress(jsonl(ROWS)) if suffix.endswith("gz") else jsonl(ROWS))
    assert documents(path) == DOCUMENTS


def test_another_field_can_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS, field="body"))
    assert documents(tmp_path / "a.jsonl", field="body") == DOCUMENTS


def test_a_jsonl_row_keeps_bytes_and_surrogates_that_are_not_unicode(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xffb"}\n{"text": "\\ud800"}\n')
    assert documents(tmp_path / "a.jsonl") == [b"a\xffb", b"\xed\xa0\x80"]


def test_packed_text_of_several_frames_is_read_to_its_end(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    text = random_text(300_000).encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text[:1000]) + gzip.compress(text[1000:]))
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(text[:1000]) + zstandard.compress(text[1000:]))
    assert documents(tmp_path / "a.txt.gz") == documents(tmp_path / "a.txt.zst") == [text]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_off_or_no_such_file_is_refused(tmp_path, suffix):
    text = random_text(50_000).encode()
    packed = gzip.compress(text) if suffix == ".gz" else pytest.importorskip("zstandard").compress(text)
    (tmp_path / f"a{suffix}").write_bytes(packed[:-5])
    refused(tmp_path / f"a{suffix}", f"a{suffix}: damaged or cut off")
    (tmp_path / f"b{suffix}").write_bytes(b"plain text " * 100)
    refused(tmp_path / f"b{suffix}", f"b{suffix}: damaged or cut off")


def test_a_folder_is_read_to_any_depth_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name, content in {
        "b.txt": b"B",
        "a/z.jsonl": jsonl(["Z"]),
        "a/y.md": b"Y",
        ".git/config": b"no",
        "a/.hidden": b"no",
        "image.png": b"\x89PNG\0\0",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert documents(tmp_path) == [b"Y", b"Z", b"B"]
    assert open_corpus(DataConfig(path=str(tmp_path))).skipped == (str(tmp_path / "image.png"),)
    assert documents(f"{tmp_path}/**/*.md") == [b"Y"]
    assert documents(f"{tmp_path}/b.txt,{tmp_path}/a") == [b"B", b"Y", b"Z"]


def test_a_missing_path_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    refused(tmp_path / "corpsu.txt", r"there is no .*corpsu.txt; did you mean .*corpus.txt\?")
    refused(tmp_path / "none" / "x" / "corpus.txt", r"there is no .*none; give a file")
    refused("python_doc", r"did you mean python_docs\?")
    refused(f"{tmp_path}/*.csv", "no file matches")
    refused("", "a name is empty")


def test_bad_content_is_refused_by_file_and_line(tmp_path):
    cases = {
        "image.txt": (b"ab\0c", "image.txt: has NUL bytes"),
        "bad.jsonl": (jsonl(["a"]) + b'{"text": \n', "bad.jsonl:2: not JSON"),
        "list.jsonl": (b"[1]\n", "list.jsonl:1: a list, expected an object"),
        "field.jsonl": (jsonl(["a"]) + b'{"txet": "x"}\n', r"field.jsonl:2: no field 'text'; did you mean txet\?"),
        "number.jsonl": (b'{"text": 3}\n', "number.jsonl:1: field 'text' holds a int, expected text"),
        "not.parquet": (b"PAR", "not.parquet: not a parquet file"),
    }
    for name, (content, match) in cases.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, match)


def test_a_parquet_file_without_the_column_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"texts": ["a"]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", r"a.parquet: no column 'text'; did you mean texts\?")


def test_a_file_that_may_not_be_read_is_refused(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("x")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", denied)
    refused(tmp_path / "a.txt", "a.txt: cannot be read: Permission denied")


@pytest.mark.parametrize(("package", "suffix"), [("pyarrow", ".parquet"), ("zstandard", ".zst")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path, package, suffix):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"a{suffix}").write_bytes(b"")
    refused(tmp_path / f"a{suffix}", rf"needs {package}: pip install 'andrea_jax\[data\]'")


def test_hugging_face_data_sets_stream_with_config_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return iter([{"text": row} for row in ROWS])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert documents("hf:org/name@small:test") == DOCUMENTS
    assert documents("hf:name") == DOCUMENTS
    assert asked == [("org/name", "small", "test", True), ("name", None, "train", True)]
    refused("hf:name", "row 0: no field 'body'", field="body")
    refused("hf:", "expected hf:NAME")


def test_what_datasets_cannot_load_is_a_users_error(monkeypatch):
    def load_dataset(*_, **__):
        raise FileNotFoundError("Dataset 'nmae' doesn't exist on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    refused("hf:nmae", "hf:nmae.*doesn't exist")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("hf:name", r"needs datasets: pip install 'andrea_jax\[hf\]'")


def test_tinyshakespeare_is_checked_and_without_a_network_the_error_says_where_to_put_it(monkeypatch, tmp_path):
    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    refused("tinyshakespeare", "put https://.* at .*tinyshakespeare.txt", prepared=str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text("To be")
    refused("tinyshakespeare", "not the known text", prepared=str(tmp_path))


def test_tinyshakespeare_downloads_once(monkeypatch, tmp_path):
    import hashlib
    import io

    text, calls = random_text(1000).encode(), []
    monkeypatch.setattr("andrea_jax.data.tinyshakespeare.SHA256", hashlib.sha256(text).hexdigest())
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **_: calls.append(a) or io.BytesIO(text))
    for _ in range(2):
        assert tinyshakespeare(tmp_path / "new").read_bytes() == text
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tinyshakespeare.txt"]


@pytest.mark.parametrize("piece_bytes", [1, 3, 50, 1000])
def test_pieces_join_to_the_document_and_end_at_lines(piece_bytes, monkeypatch, tmp_path):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 700)
    (tmp_path / "a.txt").write_text(random_text(5000), encoding="utf-8")
    pieces = [*cut_documents(readers.read_file(tmp_path / "a.txt", "text"), piece_bytes)]
    assert b"".join(pieces).decode() == random_text(5000)
    assert 0 < min(map(len, pieces)) <= max(map(len, pieces)) <= piece_bytes
    if piece_bytes == 1000:
        assert all(piece.endswith(b"\n") for piece in pieces)
        assert min(map(len, pieces[:-1])) > 700  # as long as they may be


def test_the_split_by_hash_depends_on_the_document_only_and_has_the_share_asked_for():
    docs = [f"document {i}".encode() for i in range(4000)]
    threshold = hash_threshold(0.05)
    side = {piece.text: piece.validation for piece in split_by_hash(docs, threshold)}
    assert {piece.text: piece.validation for piece in split_by_hash(docs[::-3], threshold)}.items() <= side.items()
    assert abs(sum(side.values()) / 4000 - 0.05) < 3 * (0.05 * 0.95 / 4000) ** 0.5
    wider = {piece.text for piece in split_by_hash(docs, hash_threshold(0.1)) if piece.validation}
    assert {text for text in side if side[text]} < wider  # a larger share keeps what validated before
    assert document_hash(b"document 0") == 7124425998680157978


def test_the_tail_starts_at_its_exact_byte():
    assert tail_start(1_115_394, 0.1) == 1_003_854
    assert tail_start(20, 0.05) == 19
    chunks = [readers.Chunk(b"abcd", True), readers.Chunk(b"efgh", False), readers.Chunk(b"ij", True)]
    pieces = [*split_tail(chunks, 6)]
    assert [tuple(piece) for piece in pieces] == [
        (b"abcd", True, False),
        (b"ef", False, False),
        (b"gh", False, True),
        (b"ij", True, True),
    ]


def test_the_tail_does_not_cut_a_character():
    text = "a日b".encode()
    for start in (1, 2, 3):
        assert [p.text for p in split_tail([readers.Chunk(text, True)], start)] == [b"a", "日b".encode()]
