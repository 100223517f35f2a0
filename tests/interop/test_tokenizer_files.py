"""tokenizer.json in and out: the same ids, and where a text begins and ends."""

import json

import pytest
from tokenizers import Tokenizer as Library

from andrea_jax.config import ModelConfig
from andrea_jax.data.bpe import train_bpe
from andrea_jax.data.hf_tokenizer import hf_tokenizer
from andrea_jax.data.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer
from andrea_jax.generate import generate
from andrea_jax.interop.hugging_face.tokenizer_files import read_tokenizer, tokenizer_json, write_tokenizer
from andrea_jax.parameters import init_params
from andrea_jax.sampling import SamplingConfig
from andrea_jax.settings import UserError

TEXTS = ["", "the cat sat on the mat", "the the  the\n\tthe", "naïve café 😀", "<0x41> <|endoftext|>", "Ġ▁ x"]
OWN = {
    "bytes": bytes_tokenizer(),
    "bpe": train_bpe([text.encode() * 3 for text in TEXTS], 300),
    "chars": chars_tokenizer("the catsonm", byte_fallback=True),
}


@pytest.mark.parametrize("kind", OWN)
def test_the_library_gives_the_same_ids_after_bos(kind):
    tokenizer, library = OWN[kind], Library.from_str(tokenizer_json(OWN[kind]))
    library.encode_special_tokens = True
    assert library.get_vocab_size() == tokenizer.size
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert library.encode(text).ids == [256, *ids]
        assert library.decode(ids) == text


def test_characters_without_bytes_have_no_bos():
    tokenizer = chars_tokenizer("abc", byte_fallback=False)
    library = Library.from_str(tokenizer_json(tokenizer))
    assert library.encode("cab").ids == tokenizer.encode("cab").tolist() == [2, 0, 1]
    assert library.decode([2, 0, 1]) == "cab"


@pytest.mark.parametrize("kind", OWN)
def test_what_is_written_is_read_as_the_same_ids_and_pieces(kind, tmp_path):
    write_tokenizer(tmp_path, OWN[kind], 64)
    options = {"bos_token_id": 256, "eos_token_id": 256}
    read, left_out = read_tokenizer(tmp_path, options, OWN[kind].size)
    assert (read.kind, read.size, read.bos, read.ends, left_out) == ("hf", OWN[kind].size, 256, (), [])
    assert read.pieces == OWN[kind].pieces
    for text in TEXTS:
        assert read.encode(text).tolist() == OWN[kind].encode(text).tolist()


def marked(folder, **files):
    """A byte tokenizer whose first ids are the marks of Gemma, and files beside it."""
    library = Library.from_str(tokenizer_json(bytes_tokenizer()))
    library.add_special_tokens(["<s>", "<bos>", "<eos>", "<turn>", "<image>"])  # ids from 257 on
    (folder / "tokenizer.json").write_text(library.to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("options", "files", "bos", "ends"),
    [
        ({"bos_token_id": 258, "eos_token_id": 259}, {}, 258, (259,)),
        ({"bos_token_id": 258, "eos_token_id": [259, 260]}, {}, 258, (259, 260)),
        ({"bos_token_id": 258, "eos_token_id": 259}, {"generation_config": {"eos_token_id": [260]}}, 258, (260,)),
        ({"bos_token_id": 258, "eos_token_id": 258}, {}, 258, ()),
        ({"eos_token_id": 259}, {"tokenizer_config": {"bos_token": "<bos>"}}, 258, (259,)),
        ({}, {"tokenizer_config": {"bos_token": {"content": "<s>"}}}, 257, ()),
        ({"bos_token_id": 1, "eos_token_id": 50256}, {}, 256, ()),  # defaults of a class, not this tokenizer's
    ],
)
def test_bos_and_ends_are_those_of_the_files(options, files, bos, ends, tmp_path):
    read, _ = read_tokenizer(marked(tmp_path, **files), options, 300)
    assert (read.bos, read.ends) == (bos, ends)
    again = Tokenizer.from_dict(json.loads(json.dumps(read.to_dict())))
    assert (again.bos, again.ends, again.pieces) == (bos, ends, read.pieces)
    assert read.pieces[1] == b"\x01"


def test_marks_without_a_row_in_the_model_are_left_out(tmp_path):
    read, left_out = read_tokenizer(marked(tmp_path), {"bos_token_id": 258}, 261)
    assert (read.size, left_out) == (261, ["<image>"])
    assert read.encode("ab").tolist() == [97, 98]
    with pytest.raises(UserError, match="the tokenizer has 257 ids, but the model's vocab_size is 200"):
        read_tokenizer(marked(tmp_path), {}, 200)


def test_a_folder_without_tokenizer_json_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(
        UserError, match=r"no tokenizer\.json .*save_pretrained\(FOLDER\)\. Or give another with --tokenizer"
    ):
        read_tokenizer(tmp_path, {}, 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path, {}, 300)


def test_a_text_ends_at_any_of_its_ends_and_goes_on_when_they_are_ignored():
    """A model that predicts byte 65, or its end where it is allowed: the end's row of the table is the longer."""
    tokenizer = hf_tokenizer(Library.from_str(tokenizer_json(bytes_tokenizer())).to_str(), ends=[66])
    config = ModelConfig(vocab_size=257, context_length=8, d_model=8, n_layer=1, n_head=1)
    import jax

    params = init_params(jax.random.key(0), config)
    shift = 0 * params["final_norm"]["shift"] + 1
    rows = 0 * params["token_embedding"]
    params |= {"token_embedding": rows.at[65].set(1).at[66].set(2)}
    params["final_norm"] = {"gain": 0 * shift, "shift": shift}
    greedy, going_on = SamplingConfig(temperature=0), SamplingConfig(temperature=0, ignore_end=True)
    assert generate(params, config, tokenizer, ["x"], greedy, 4) == [""]
    assert generate(params, config, tokenizer, ["x"], going_on, 4) == ["AAAA"]
