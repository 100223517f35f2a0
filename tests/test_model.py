import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import SEGMENTS, TOKENS, B, T, V, drawn, tiny
from reference_model import logits as logits_of

from andrea_jax import model
from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers import residual
from andrea_jax.loss import loss_fn
from andrea_jax.model import block_forward, hidden_forward, model_forward, unstack
from andrea_jax.parameters import init_params, path_name
from andrea_jax.settings import UserError

ULP, BF16 = 2.0**-23, 2.0**-8  # rounding: half a unit in the last of 24 and 8 bits, relative to the power of two below
L, N = 2, 2
TINY = tiny()
CONFIGS = {
    "default": TINY,
    "bare": tiny(activation="relu", mlp_bias=False, norm_gain=False, norm_shift=False),
    "everything": tiny(mlp_ratio=3, attention_bias=True, tie_embeddings=False, vocab_multiple=8),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one", "packed"])
def test_the_whole_forward_equals_float64(name, segments):
    config = CONFIGS[name]
    params = drawn(config)
    expected = logits_of(params, TOKENS, config, segments)
    logits = jax.jit(lambda p: model_forward(p, TOKENS, config, segments_BT=segments))(params)
    assert (logits.shape, logits.dtype) == ((B, T, V), jnp.float32)
    # Two blocks of about eight sums each, every one off by a few ulp of the stream.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=64 * ULP * np.abs(expected).max())


@pytest.mark.parametrize("name", ["default", "everything"])
def test_the_gradient_of_every_tensor_equals_central_differences_in_float64(name):
    config = CONFIGS[name]
    params, rng = drawn(config), np.random.default_rng(2)
    cotangent = rng.standard_normal((B, T, V))

    def value(p):
        return (model_forward(p, TOKENS, config, segments_BT=SEGMENTS) * jnp.float32(cotangent)).sum()

    for path, grad in jax.tree.leaves_with_path(jax.jit(jax.grad(value))(params)):
        direction = rng.standard_normal(grad.shape)

        def along(h, path=path, direction=direction):
            moved = jax.tree.map_with_path(
                lambda p, x: np.asarray(x, np.float64) + (h * direction if p == path else 0), params
            )
            return (logits_of(moved, TOKENS, config, SEGMENTS) * cotangent).sum()

        slope = (along(1e-5) - along(-1e-5)) / 2e-5  # off by about h^2 times the third derivative
        found = (np.asarray(grad, np.float64) * direction).sum()
        atol = 64 * ULP * np.linalg.norm(grad) * np.linalg.norm(direction)
        np.testing.assert_allclose(found, slope, rtol=1e-7, atol=atol, err_msg=path_name(path))


def loss_and_gradient(engine, dropout_key=None, config=TINY):
    batch = {"tokens_BT": TOKENS, "targets_BT": np.roll(TOKENS, -1, 1), "weights_BT": np.ones((B, T), np.float32)}
    batch["segments_BT"] = SEGMENTS
    value = partial(loss_fn, batch=batch, config=config, engine=engine, dropout_key=dropout_key)
    (loss, _), grads = jax.jit(jax.value_and_grad(lambda p: value(p), has_aux=True))(drawn(config))
    return {"loss": loss} | {path_name(path): g for path, g in jax.tree.leaves_with_path(grads)}


@pytest.fixture(scope="module")
def plain():
    return loss_and_gradient(EngineConfig(attention="explicit", blocks="unroll"))


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(attention="explicit", blocks="scan"),
        EngineConfig(attention="blockwise", attention_block=4, blocks="scan", remat="block"),
        EngineConfig(attention="blockwise", attention_block=4, blocks="unroll", remat="attention", loss_chunk=6),
        EngineConfig(attention="xla", blocks="scan", remat="attention"),
        EngineConfig(attention="explicit", blocks="unroll", remat="block"),
    ],
    ids=lambda e: f"{e.blocks}-{e.attention}-{e.remat}",
)
def test_engine_options_change_nothing_but_rounding(plain, engine):
    for name, found in loss_and_gradient(engine).items():
        atol = 64 * ULP * np.abs(plain[name]).max()
        np.testing.assert_allclose(found, plain[name], rtol=0, atol=atol, err_msg=name)


def test_dropout_is_the_same_unrolled_and_scanned_and_recomputed(plain):
    config, key = tiny(dropout=0.3), jax.random.key(3)
    unrolled = loss_and_gradient(EngineConfig(blocks="unroll"), key, config)
    for name, found in loss_and_gradient(EngineConfig(blocks="scan", remat="block"), key, config).items():
        atol = 64 * ULP * np.abs(unrolled[name]).max()
        np.testing.assert_allclose(found, unrolled[name], rtol=0, atol=atol, err_msg=name)
        assert np.any(found != plain[name])


def test_every_dropout_has_a_key_of_its_own_and_the_callers_key_decides(monkeypatch):
    seen = []

    def noted(x, rate, keys_B):
        seen.extend(map(tuple, jax.random.key_data(keys_B).tolist()))
        return x

    for module in (model, residual):
        monkeypatch.setattr(module, "dropout", noted)
    config = tiny(dropout=0.3)
    for seed in (0, 1):
        hidden_forward(drawn(config), TOKENS, config, EngineConfig(blocks="unroll"), dropout_key=jax.random.key(seed))
    rows = len(TOKENS)
    assert len(seen) == len(set(seen)) == 2 * rows * (1 + 2 * L)  # the embeddings, and two branches a layer


def test_a_position_never_sees_a_later_one():
    """The gradient of position t's logits with respect to later position embeddings is exactly zero."""
    params = drawn(TINY)

    @jax.jit
    def reached(t):
        def size(table):
            return (model_forward({**params, "position_embedding": table}, TOKENS, TINY)[:, t] ** 2).sum()

        return jax.grad(size)(params["position_embedding"])

    for t in (0, 5, 8):
        grad_TD = np.asarray(reached(t))
        assert np.all(grad_TD[t + 1 :] == 0)
        assert np.all(np.abs(grad_TD[: t + 1]).sum(-1) > 0)


def test_no_gradient_flows_between_documents_in_one_window():
    config = tiny(tie_embeddings=False)
    params, tokens = drawn(config), np.arange(T)[None]  # every position has a token of its own

    @jax.jit
    def reached(segments):
        def size(table):
            logits = model_forward({**params, "token_embedding": table}, tokens, config, segments_BT=segments)
            return (logits[:, 4:] ** 2).sum()

        return jnp.abs(jax.grad(size)(params["token_embedding"])).sum(-1)

    assert np.all(np.asarray(reached(SEGMENTS[:1])[:4]) == 0)
    assert np.all(np.asarray(reached(SEGMENTS[:1])[4:T]) > 0)
    assert np.all(np.asarray(reached(0 * SEGMENTS[:1])[:T]) > 0)


INIT = ModelConfig(vocab_size=1000, context_length=32, d_model=64, n_layer=12, n_head=4, tie_embeddings=False)


@pytest.fixture(scope="module")
def at_init():
    return init_params(jax.random.key(0), INIT)


@pytest.mark.parametrize(("width", "depth"), [(64, 2), (384, 6), (768, 12)])
def test_a_block_is_nearly_the_identity_at_init_on_the_stream_that_it_meets(width, depth):
    """Claim 2 of the lesson, at nano's, 12M's and 120M's width and depth."""
    config = ModelConfig(1000, 64, width, 1, width // 32)
    params = init_params(jax.random.key(0), config)
    of_depth = 1 / math.sqrt(depth)  # one block drawn as one of `depth`: init scales its two outputs by this
    first = jax.tree.map(lambda stacked: stacked[0], params["blocks"])
    first["attention"]["out"] *= of_depth
    first["mlp"]["w_2"] *= of_depth
    tokens = np.random.default_rng(0).integers(0, 1000, (2, 64))
    x_BTD = params["token_embedding"][tokens] + params["position_embedding"]
    delta = jax.jit(partial(block_forward, config=config))(first, x_BTD) - x_BTD
    # relative to the stream attention adds (2/5) / sqrt(2L) at most, the MLP 2 sqrt(2/5) rms(gelu) / sqrt(2L), where
    # rms(gelu) is 0.43 for numbers of std sqrt(2/5): together 0.67 / sqrt(2L)
    assert 0 < jnp.linalg.norm(delta) < 0.7 / math.sqrt(2 * depth) * jnp.linalg.norm(x_BTD)


def test_the_loss_of_a_tied_model_at_init_is_near_chance():
    """Rows of length 1 times a stream of length 1: a token's own logit is below 1, the others' std is 1/sqrt(D)."""
    config = ModelConfig(1000, 32, 256, 2, 4)
    tokens = np.random.default_rng(0).integers(0, 1000, (4, 33))
    batch = {"tokens_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:], "weights_BT": np.ones((4, 32), np.float32)}
    params = init_params(jax.random.key(0), config)
    loss, _ = jax.jit(lambda p: loss_fn(p, batch, config, EngineConfig(blocks="scan")))(params)
    assert abs(loss - math.log(1000)) < 0.05


def test_the_loss_at_init_is_near_chance(at_init):
    """An untied head of std sqrt(2/(5D)) over a normed stream gives normal logits of variance 2/5."""
    tokens = np.random.default_rng(0).integers(0, 1000, (16, 33))
    batch = {"tokens_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:], "weights_BT": np.ones((16, 32), np.float32)}
    loss, _ = jax.jit(lambda p: loss_fn(p, batch, INIT, EngineConfig(blocks="scan")))(at_init)
    variance = 2 / 5
    # The mean of 512 targets' logits has standard error sqrt(variance / 512); five of them.
    assert abs(loss - (math.log(1000) + variance / 2)) < 5 * math.sqrt(variance / 512)


def test_blocks_with_zero_output_matrices_are_exactly_the_identity():
    params = drawn(TINY)
    first = jax.tree.map(lambda stacked: stacked[0], params["blocks"])
    for branch, names in (("attention", ["out"]), ("mlp", ["w_2", "b_2"])):
        first[branch] = first[branch] | {name: 0 * first[branch][name] for name in names}
    x_BTD = jax.random.normal(jax.random.key(1), (2, 8, 16))
    block = jax.jit(partial(block_forward, config=TINY))
    np.testing.assert_array_equal(block(first, x_BTD), x_BTD)
    assert jax.eval_shape(block, first, x_BTD.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", BF16), ("float16", BF16 / 8)])
def test_half_precision_logits_err_by_their_rounding(dtype, unit):
    params = drawn(TINY)
    logits = jax.jit(lambda p: model_forward(p, TOKENS, TINY, EngineConfig(dtype=dtype)))(params)
    assert logits.dtype == jnp.float32
    expected = logits_of(params, TOKENS, TINY)
    error = np.linalg.norm(np.asarray(logits, np.float64) - expected) / np.linalg.norm(expected)
    # About twelve roundings a block, each of unit / 2 in the root mean square, and the stream carries them on.
    assert unit / 8 < error < unit / 2 * math.sqrt(12 * L)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(UserError, match=r"^13 tokens, but context_length is 12$"):
        model_forward(drawn(TINY), jnp.zeros((1, 13), int), TINY)
    assert jax.eval_shape(lambda p: model_forward(p, jnp.zeros((1, 12), int), TINY), drawn(TINY)).shape == (1, 12, V)


def test_unstacked_layers_are_the_slices():
    blocks = drawn(TINY)["blocks"]
    for layer, p in enumerate(unstack(blocks, L)):
        jax.tree.map(lambda one, all_, layer=layer: np.testing.assert_array_equal(one, all_[layer]), p, blocks)
