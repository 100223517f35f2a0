import dataclasses
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import bytes_tokenizer, chars_tokenizer
from andrea_jax.engine import EngineConfig
from andrea_jax.generate import _decode, encode_prompt, generate, stream
from andrea_jax.key_value_cache import decode_step, empty_cache, prefill
from andrea_jax.model import model_forward
from andrea_jax.parameters import abstract_params
from andrea_jax.sample_tokens import _next_tokens, sample_tokens
from andrea_jax.sampling import SamplingConfig, choose_tokens
from andrea_jax.settings import RunError, UserError

TIED = ModelConfig(vocab_size=31, context_length=13, d_model=20, n_layer=3, n_head=5, attention_bias=True)
UNTIED = ModelConfig(
    vocab_size=29, context_length=10, d_model=21, n_layer=2, n_head=3, activation="relu", mlp_bias=False,
    norm_gain=False, norm_shift=False, tie_embeddings=False, vocab_multiple=8, dropout=0.3,
)  # fmt: skip
WINDOWED = ModelConfig(
    vocab_size=29, context_length=12, d_model=20, n_layer=2, n_head=4, n_kv_head=2, head_size=6, position="rotary",
    window=5, global_every=2, rotary_local_base=20.0, attention_soft_cap=3.0, logit_soft_cap=20.0, norm="rms",
    norm_position="sandwich", qk_norm=True, gated=True,
)  # fmt: skip
SLOPED = ModelConfig(
    vocab_size=29, context_length=9, d_model=30, n_layer=2, n_head=3, position="alibi", norm_position="post",
    norm_shift=False,
)  # fmt: skip
NARROW = ModelConfig(vocab_size=17, context_length=1, d_model=6, n_layer=1, n_head=1)
BYTES = bytes_tokenizer()
GREEDY = SamplingConfig(temperature=0)
FLOAT32, BFLOAT16 = EngineConfig(dtype="float32"), EngineConfig(dtype="bfloat16")
STATIC = ("config", "engine")
forward, fill, step = (jax.jit(f, static_argnames=STATIC) for f in (model_forward, prefill, decode_step))
choose = jax.jit(choose_tokens)


def lively_params(config, seed=0):
    """Far from init, so that blocks matter and greedy text does not repeat itself."""
    rng = np.random.default_rng(seed)

    def start(path, leaf):
        return 0.4 * rng.standard_normal(leaf.shape, np.float32) + np.float32(path[-1].key == "gain")

    return jax.tree.map_with_path(start, abstract_params(config))


def random_prompts(config, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(config.vocab_size, size=n) for n in lengths]


def recite_params(ids, config):
    """Parameters whose most probable token after position t is ids[t], whatever the tokens were."""
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(config))
    params["position_embedding"] = np.eye(config.context_length, config.d_model, dtype=np.float32)
    params["final_norm"]["gain"][:] = 1
    params["head"][np.arange(len(ids)), ids] = 10
    return params


def recite(data, tokenizer=BYTES, **options):
    """(what `generate` and `stream` give for a model that says `data`, from BOS on): text, pieces."""
    ids = list(data)
    config = ModelConfig(
        vocab_size=tokenizer.size, context_length=64, d_model=64, n_layer=1, n_head=1, tie_embeddings=False
    )
    sampling = SamplingConfig(temperature=0, **options)
    arguments = (recite_params(ids, config), config, tokenizer)
    (text,) = generate(*arguments, [""], sampling, len(ids))
    pieces = list(stream(*arguments, "", sampling, len(ids)))
    assert "".join(pieces) == text
    return text, pieces


def reference_tokens(params, prompt, config, sampling, seed, row, count):
    """One forward pass over the whole window for each token; the window's rule written out."""
    window, tokens = list(prompt), []
    for i in range(count):
        if len(window) > config.context_length:
            window = window[-max(1, config.context_length // 2) :]
        padded = np.pad(window, (0, config.context_length - len(window)))[None].astype(np.int32)
        logits_BV = forward(params, padded, config, FLOAT32)[:, len(window) - 1]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), i)
        limits = sampling.limits(config.vocab_size)
        tokens.append(int(choose(key[None], logits_BV, np.ones(config.vocab_size, bool), limits)[0]))
        window.append(tokens[-1])
    return tokens


@pytest.mark.parametrize(
    ("config", "engine"),
    [(TIED, FLOAT32), (TIED, BFLOAT16), (UNTIED, FLOAT32), (WINDOWED, FLOAT32), (WINDOWED, BFLOAT16)],
    ids=["tied", "bfloat16", "untied", "windowed", "windowed bfloat16"],
)
def test_cached_logits_equal_the_full_forward_at_every_position(config, engine):
    """Tolerance: 4 roundings a block, and 4 at the end, each of the size of the largest logit."""
    params = lively_params(config)
    tokens_BT = np.stack(random_prompts(config, [config.context_length] * 3))
    expected_BTV = np.asarray(forward(params, tokens_BT, config, engine))
    tolerance = 4 * (config.n_layer + 1) * float(jnp.finfo(engine.activation_dtype).eps) * np.abs(expected_BTV).max()
    for filled in (0, 1, config.context_length - 2):
        cache = empty_cache(3, config, engine)
        if filled:
            cache = fill(params, cache, tokens_BT[:, :filled], np.ones(3, bool), config, engine)
        for t in range(filled, config.context_length):
            logits_BV, cache = step(params, cache, tokens_BT[:, t], np.full(3, t, np.int32), config, engine)
            assert logits_BV.dtype == jnp.float32
            np.testing.assert_allclose(logits_BV, expected_BTV[:, t], rtol=0, atol=tolerance)


def test_prefill_leaves_other_rows_bit_equal():
    params = lively_params(TIED)
    tokens_BT = np.stack(random_prompts(TIED, [7, 7]))
    before = fill(params, empty_cache(2, TIED, FLOAT32), tokens_BT, np.array([True, True]), TIED, FLOAT32)
    after = fill(params, before, tokens_BT[::-1], np.array([False, True]), TIED, FLOAT32)
    np.testing.assert_array_equal(after.k[:, 0], before.k[:, 0])
    np.testing.assert_array_equal(after.v[:, 0], before.v[:, 0])
    assert not np.array_equal(after.k[:, 1], before.k[:, 1])


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.0, top_k=20, top_p=0.95)], ids=["0", "1"])
@pytest.mark.parametrize(
    "config", [TIED, UNTIED, NARROW, WINDOWED, SLOPED], ids=["tied", "untied", "narrow", "windowed", "sloped"]
)
def test_a_batch_equals_each_row_by_full_forward_passes_also_past_the_context(config, sampling):
    """Prompts of different lengths, windows that move at different times, each token by its documented key."""
    params = lively_params(config)
    longest = config.context_length
    prompts = random_prompts(config, [1, longest, max(1, longest // 2), max(1, longest - 1)])
    count = 3 * longest + 2
    everything = np.ones(config.vocab_size, bool)
    rows = np.stack(list(islice(sample_tokens(params, prompts, everything, config, sampling, 5, FLOAT32), count)), 1)
    for row, prompt in enumerate(prompts):
        assert rows[row].tolist() == reference_tokens(params, prompt, config, sampling, 5, row, count)
    assert config is NARROW or len(set(rows.flatten().tolist())) > 3


SMALL = ModelConfig(vocab_size=300, context_length=24, d_model=24, n_layer=2, n_head=3, vocab_multiple=64)


@pytest.fixture(scope="module")
def small_params():
    return lively_params(SMALL)


def test_each_text_of_a_batch_equals_that_prompt_alone(small_params):
    prompts = ["a", "", "a longer prompt", "ab", "x" * 14]
    together = generate(small_params, SMALL, BYTES, prompts, GREEDY, 60)
    assert together == [generate(small_params, SMALL, BYTES, [prompt], GREEDY, 60)[0] for prompt in prompts]
    assert len(set(together)) == len(prompts)


def test_a_sampled_text_depends_on_seed_and_place_only(small_params):
    def texts(prompts, seed=0):
        return generate(small_params, SMALL, BYTES, prompts, SamplingConfig(ignore_end=True), 40, seed)

    base = texts(["one", "two"])
    assert base == texts(["one", "two"])
    assert base != texts(["one", "two"], seed=1)
    assert texts(["another", "two"])[1] == base[1]
    assert (
        texts(["one"])[0]
        == base[0]
        == "".join(stream(small_params, SMALL, BYTES, "one", SamplingConfig(ignore_end=True), 40))
    )
    first, second = texts(["same", "same"])
    assert first != second


def test_one_decode_step_is_compiled_for_all_tokens_prompts_seeds_and_settings(small_params):
    config = dataclasses.replace(SMALL, dropout=0.25)  # computes the same; nothing was compiled for it yet
    before = _next_tokens._cache_size()
    for seed, (sampling, prompt) in enumerate(
        [(GREEDY, ""), (SamplingConfig(top_k=5), "some text"), (SamplingConfig(top_p=0.5, min_p=0.1), "x" * 12)]
    ):
        generate(small_params, config, BYTES, [prompt], sampling, 60, seed)
    assert _next_tokens._cache_size() == before + 1


@pytest.mark.parametrize("tie", [True, False])
def test_ids_without_bytes_are_never_sampled_however_probable(tie):
    """Ids from 257 on, which the tokenizer does not have, and the padding rows get the largest logits by far."""
    config = dataclasses.replace(SMALL, tie_embeddings=tie)
    params = lively_params(config)
    params["final_norm"] = {"gain": np.zeros(24, np.float32), "shift": np.ones(24, np.float32)}
    if tie:  # logits are the sums of these rows, or of the columns
        params["token_embedding"][257:] = 1e4
    else:
        params["head"][:, 257:] = 1e4
    for sampling in (GREEDY, SamplingConfig(temperature=2.0), SamplingConfig(top_k=50, top_p=0.99, min_p=1e-3)):
        texts = generate(params, config, BYTES, ["a", "b"], dataclasses.replace(sampling, ignore_end=True), 40)
        assert min(map(len, texts)) > 0


def test_a_text_ends_at_the_end_of_its_document_unless_told_not_to():
    ids = [*b"first", BYTES.bos, *b"second"]
    assert recite(ids)[0] == "first"
    text, _ = recite(ids, ignore_end=True)
    assert text.startswith("first")
    assert text.endswith("second")


def test_no_token_is_computed_after_the_last_text_has_ended():
    def tokens():
        for a, b in (b"ab", (BYTES.bos, 98), (97, BYTES.bos)):
            yield np.array([a, b])
        pytest.fail("asked for more tokens")

    assert list(_decode(BYTES, tokens(), 2, ())) == [["a", "b"], ["", "b"], ["", ""]]


def test_a_stop_text_across_tokens_ends_the_text_and_is_never_shown():
    text, pieces = recite(b"one EN two END three", stop=("END", "?"))
    assert text == "one EN two "
    assert pieces == [*"one ", "EN ", *"two "]


def test_a_stop_text_inside_a_token_and_of_more_bytes_than_characters():
    words = dataclasses.replace(BYTES, pieces=(*BYTES.pieces, b"word -", b"-> tail", "é".encode(), b"one. two! x"))
    assert recite([257, 258, *b"x"], words, stop=("-->",))[0] == "word "
    assert recite([*b"caf", 259, *b"x"], words, stop=("é",)) == ("caf", ["c", "a", "f"])
    assert recite([260, *b"x"], words, stop=("!", ".", "x"))[0] == "one"


def test_what_only_begins_like_a_stop_text_is_given_at_the_end():
    assert recite(b"the EN", stop=("END",))[0] == "the EN"
    assert recite(b"aab", stop=("aac",))[0] == "aab"
    assert recite(b"xaab", stop=("ab",))[0] == "xa"


def test_streamed_characters_are_never_split():
    text = "héllo 世界 🙂 e\u0301"
    assert recite(text.encode()) == (text, list(text))


def test_bytes_that_are_no_character_become_replacement_characters():
    assert recite(b"a\xffb\xe4\xb8c\xf0\x9f")[0] == b"a\xffb\xe4\xb8c\xf0\x9f".decode(errors="replace")


def test_a_stream_gives_its_first_piece_before_the_last_token(small_params):
    pieces = stream(small_params, SMALL, BYTES, "go", SamplingConfig(ignore_end=True), max_tokens=10**12)
    assert len(list(islice(pieces, 3))) == 3


def test_prompts_begin_with_bos_and_without_bos_with_something():
    assert encode_prompt(BYTES, "ab", 3).tolist() == [256, 97, 98]
    assert encode_prompt(BYTES, "", 1).tolist() == [256]
    assert encode_prompt(chars_tokenizer("ab\n", byte_fallback=False), "", 1).tolist() == [0]
    assert encode_prompt(chars_tokenizer("ab\t\n", byte_fallback=False), "", 1).tolist() == [1]
    assert encode_prompt(chars_tokenizer("ab", byte_fallback=False), "", 1).tolist() == [0]
    assert encode_prompt(chars_tokenizer("ab", byte_fallback=False), "ba", 2).tolist() == [1, 0]


def test_no_prompts_give_no_texts(small_params):
    assert generate(small_params, SMALL, BYTES, []) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: generate(p, SMALL, BYTES, ["ok", "x" * 24]), "25 tokens with BOS, but context_length is 24"),
        (lambda p: stream(p, SMALL, BYTES, "x" * 24), "a prompt has 25 tokens"),
        (lambda p: generate(p, SMALL, BYTES, ["a"], max_tokens=0), "max_tokens = 0: must be at least 1"),
        (lambda p: generate(p, SMALL, BYTES, "a"), "expected a list of texts"),
        (lambda p: generate(p, SMALL, chars_tokenizer("ab", byte_fallback=False), ["abc"]), "the character 'c'"),
        (lambda p: generate(p, TIED, BYTES, ["a"]), "the tokenizer has 257 ids, but ModelConfig.vocab_size is 31"),
    ],
    ids=["long", "long stream", "no tokens", "one text", "unknown character", "other tokenizer"],
)  # fmt: skip
def test_wrong_input_is_refused_before_anything_runs(small_params, call, message):
    with pytest.raises(UserError, match=message):
        call(small_params)


def test_parameters_that_are_not_finite_stop_the_run(small_params):
    broken = {**small_params, "token_embedding": small_params["token_embedding"].copy()}
    broken["token_embedding"][97] = np.nan
    with pytest.raises(RunError, match="logits are not finite"):
        generate(broken, SMALL, BYTES, ["a"])
