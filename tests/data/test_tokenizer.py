import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_text import random_text
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from andrea_jax.data.bpe import byte_letters, train_bpe
from andrea_jax.data.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, load_tokenizer
from andrea_jax.settings import UserError

TEXT = random_text(20_000)


def byte_level_hf(normalizer=None):
    letters = byte_letters()
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"th": 256, "the": 257}
    library = Library(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    if normalizer:
        library.normalizer = normalizer
    return library


def saved(library, tmp_path):
    library.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


LOSSLESS = {
    "bytes": bytes_tokenizer(),
    "chars": chars_tokenizer(TEXT),
    "bpe": train_bpe([TEXT.encode()], 400),
    "hf": Tokenizer.from_dict({"kind": "hf", "definition": byte_level_hf().to_str()}),
}


@pytest.mark.parametrize("kind", LOSSLESS)
@given(
    data=st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | st.sampled_from(TEXT.split("\n")).map(str.encode)
)
@example(data="the café \ud7ff\U0010ffff<|endoftext|><bos>".encode() + b"\xff\xed\xa0\x80\xe6\x97the\xc3")
@example(data=b"")
@settings(max_examples=150, deadline=None)
def test_any_bytes_come_back(kind, data):
    tokenizer = LOSSLESS[kind]
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == data
    assert tokenizer.byte_lengths[ids].sum() == len(data)
    assert tokenizer.bos not in ids


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_tokenizer_travels_as_json(kind, tmp_path):
    tokenizer = LOSSLESS[kind]
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    tokenizer.save(tmp_path / "tokenizer.json")
    for other in (again, load_tokenizer(tmp_path / "tokenizer.json")):
        assert (other.kind, other.size, other.bos) == (tokenizer.kind, tokenizer.size, tokenizer.bos)
        np.testing.assert_array_equal(other.encode(TEXT), tokenizer.encode(TEXT))
        assert other.to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_batch_is_encoded_like_its_members(kind):
    texts = [b"the \xff model", "", "café\n", b"\xff\xfe"]
    for ids, text in zip(LOSSLESS[kind].encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, LOSSLESS[kind].encode(text))


@pytest.mark.parametrize("kind", LOSSLESS)
def test_bos_decodes_to_nothing_and_ids_out_of_range_are_refused(kind):
    tokenizer = LOSSLESS[kind]
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("a"), tokenizer.bos]) == b"a"
    assert tokenizer.byte_lengths[tokenizer.bos] == 0
    assert tokenizer.byte_lengths.shape == (tokenizer.size,)
    for bad in (-1, tokenizer.size):
        with pytest.raises(ValueError, match="this tokenizer has 0 to"):
            tokenizer.decode([bad])


def test_bytes_are_their_own_ids():
    tokenizer = bytes_tokenizer()
    assert (tokenizer.size, tokenizer.bos) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]


def test_characters_alone_are_exactly_those_of_the_text_in_order():
    tokenizer = chars_tokenizer("banana é", byte_fallback=False)
    assert (tokenizer.size, tokenizer.bos) == (5, None)
    assert tokenizer.encode("abné ").tolist() == [1, 2, 3, 4, 0]
    assert tokenizer.decode([4, 1]) == "éa".encode()
    with pytest.raises(UserError, match="the character 'z' is not among this tokenizer's 5"):
        tokenizer.encode("abz")
    with pytest.raises(UserError, match="byte 0xff is not UTF-8"):
        tokenizer.encode(b"ab\xff")


def test_characters_with_bytes_start_behind_bos():
    tokenizer = chars_tokenizer("ba")
    assert (tokenizer.size, tokenizer.bos) == (259, 256)
    assert tokenizer.encode("abzé").tolist() == [257, 258, ord("z"), 0xC3, 0xA9]


def test_bpe_ids_are_bytes_then_bos_then_segments_in_the_order_found():
    tokenizer = train_bpe([b"the then them other " * 20], 260)
    assert (tokenizer.size, tokenizer.bos) == (260, 256)
    assert tokenizer.pieces[:256] == tuple(bytes([b]) for b in range(256))
    assert tokenizer.pieces[257:] == (b"he", b"the", b" the")
    assert tokenizer.encode("the").tolist() == [258]
    assert tokenizer.encode(b"\xff<").tolist() == [255, 60]


def test_bpe_says_how_many_merges_were_asked_for_and_found():
    tokenizer = train_bpe([b"ab ab"], 8449)
    assert tokenizer.recipe["requested"] == 8192
    assert len(tokenizer.recipe["merges"]) == tokenizer.size - 257 < 10


def test_bpe_of_few_bytes_asks_for_a_larger_vocabulary():
    with pytest.raises(UserError, match="vocab_size = 256: bpe needs at least 257"):
        train_bpe([b"abc"], 256)
    assert train_bpe([b"abc abc"], 257).size == 257


def test_bpe_training_gives_the_same_merges_in_every_process():
    script = (
        "import hashlib, json, sys; from andrea_jax.data.bpe import train_bpe;"
        "print(json.dumps(train_bpe([sys.stdin.buffer.read()], 400).to_dict()), end='')"
    )
    for hash_seed in ("1", "2"):
        env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", script], input=TEXT.encode(), env=env, capture_output=True, check=True
        )
        assert json.loads(done.stdout) == LOSSLESS["bpe"].to_dict()


def test_bpe_is_shorter_than_bytes():
    assert len(LOSSLESS["bpe"].encode(TEXT)) < 0.5 * len(TEXT.encode())


def test_our_letters_are_the_librarys():
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, range(32, 1000)))
    spelled = "".join(byte_letters()[b] for b in text.encode())
    assert "".join(part for part, _ in library.pre_tokenize_str(text)) == spelled


def test_a_hugging_face_tokenizer_encodes_as_its_library_does(tmp_path):
    library = byte_level_hf()
    tokenizer = saved(library, tmp_path)
    assert (tokenizer.kind, tokenizer.size, tokenizer.bos) == ("hf", 259, 258)
    assert tokenizer.encode(TEXT).tolist() == library.encode(TEXT).ids
    assert tokenizer.decode(library.encode("the<|endoftext|>").ids) == b"the"


def test_a_sentencepiece_form_with_byte_fallback_keeps_any_bytes(tmp_path):
    names = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    library = Library(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("▁", "h"), ("▁h", "i")],
            byte_fallback=True,
            unk_token="<0x00>",
        )
    )
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = saved(library, tmp_path)
    assert tokenizer.bos == 0
    data = " hi hé 日".encode() + b"\xff hi"
    assert tokenizer.decode(tokenizer.encode(data)) == data
    assert tokenizer.encode(" hi").tolist() == [names.index("▁hi")]


def test_wordpiece_decodes_to_words_with_spaces_and_without_a_bos(tmp_path):
    library = Library(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2, "to": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece(prefix="##")
    tokenizer = saved(library, tmp_path)
    assert tokenizer.bos is None
    assert tokenizer.decode(tokenizer.encode("unable to")) == b" unable to"
    assert tokenizer.encode(b"to \xff")[0] == 3


def test_files_that_are_no_tokenizers_are_refused_by_name(tmp_path):
    for content, match in [
        ("{", "not JSON"),
        ("{}", "has no 'model'"),
        ('{"model": {"type": "?"}}', "tokenizer.json: "),
    ]:
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(UserError, match=match):
            load_tokenizer(tmp_path / "t.json")
    with pytest.raises(UserError, match=r"none.json: no tokenizer can be read there"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(UserError, match="not a tokenizer of andrea_jax"):
        Tokenizer.from_dict({"kind": "morse"})
