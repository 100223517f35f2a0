"""Models of our own, written in Hugging Face's form and run by transformers."""

import dataclasses

import jax.numpy as jnp
import pytest
from interop.asking import answer, load, some_tokens, torch, transformers
from interop.parity import ENGINE, ROUNDING, distance
from interop.test_tensors import GEMMA, LLAMA, SMALL, random_params
from interop.test_tokenizer_files import OWN, TEXTS

from andrea_jax.generate import encode_prompt, generate
from andrea_jax.interop.hugging_face import write_model
from andrea_jax.model import model_forward
from andrea_jax.presets import andrea_12m, andrea_12m_card
from andrea_jax.sampling import SamplingConfig

TINY = dict(vocab_size=300, context_length=32, d_model=24, n_layer=2, n_head=4)


@pytest.mark.parametrize(
    "config",
    [
        andrea_12m(**TINY),
        andrea_12m_card(**TINY),
        andrea_12m(**TINY, vocab_multiple=64, attention_bias=True, activation="relu2", dropout=0.2),
        dataclasses.replace(LLAMA, norm_gain=False, activation="gelu_exact"),
        dataclasses.replace(LLAMA, rotary_scaling="yarn", rotary_factor=2.0, rotary_original=8, rotary_fast=3.0),
        dataclasses.replace(LLAMA, qk_norm=True, window=4, global_every=2),
        dataclasses.replace(LLAMA, n_expert=4, expert_size=20),
        dataclasses.replace(GEMMA, window=4, attention_soft_cap=5.0, logit_soft_cap=20.0, attention_scale=1 / 3),
    ],
    ids=range(8),
)
def test_the_logits_are_ours(config, record, tmp_path):
    written = write_model(tmp_path / "x", random_params(config), config, OWN["bpe"])
    tokens = some_tokens(config.vocab_size, (2, 16))

    def ask():
        model = load(tmp_path / "x")
        assert model.config.model_type == written.model_type
        return {"logits": model(torch.from_numpy(tokens)).logits.detach()}

    theirs = answer(record, ask, tmp_path / "x")
    ours = model_forward(random_params(config), jnp.asarray(tokens), config, ENGINE)
    assert distance(ours, theirs["logits"]) < ROUNDING


def test_shards_in_bfloat16_load_as_they_were_rounded(record, tmp_path):
    options = dict(dtype="bfloat16", shard_bytes=20_000)
    written = write_model(tmp_path / "x", random_params(LLAMA), LLAMA, OWN["bpe"], **options)
    assert len(written.files) > 1

    def ask():
        model = load(tmp_path / "x")
        assert model.dtype == torch.bfloat16
        head = torch.from_numpy(random_params(LLAMA)["head"].T.copy())
        assert torch.equal(model.lm_head.weight, head.bfloat16())
        return {}

    answer(record, ask, tmp_path / "x")


@pytest.mark.parametrize("kind", OWN)
def test_auto_tokenizer_gives_the_ids_of_a_prompt(kind, record, tmp_path):
    config = dataclasses.replace(SMALL, vocab_size=OWN[kind].size, context_length=64)
    write_model(tmp_path / "x", random_params(config), config, OWN[kind])
    texts = [text for text in TEXTS if "<|endoftext|>" not in text]

    def ask():
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 256, 64)
        ids = [tokenizer(text).input_ids for text in texts]
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
        return {str(number): one for number, one in enumerate(ids)}

    theirs = answer(record, ask, tmp_path / "x")
    for ids, text in zip(theirs.values(), texts, strict=True):
        assert ids.tolist() == encode_prompt(OWN[kind], text, 64).tolist()


def test_a_prompt_goes_on_as_the_same_text(record, tmp_path):
    config = andrea_12m(**TINY, tie_embeddings=False)
    write_model(tmp_path / "x", random_params(config), config, OWN["bpe"])

    def ask():
        prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")("the cat", return_tensors="pt")
        ids = load(tmp_path / "x").generate(**prompt, max_new_tokens=12, do_sample=False)
        return {"ids": ids[0, prompt.input_ids.shape[1] :]}

    ids = answer(record, ask, tmp_path / "x")["ids"]
    greedy = SamplingConfig(temperature=0)
    (text,) = generate(random_params(config), config, OWN["bpe"], ["the cat"], greedy, 12)
    assert text.encode() == OWN["bpe"].decode(ids).decode("utf-8", "replace").encode()
    assert len(text) > 4
