"""Every variant of the block against float64 NumPy, and against itself computed in other ways."""

import dataclasses
import functools
import typing

import jax
import numpy as np
import pytest
import reference_model
from reference_model import SEGMENTS, TOKENS, VARIANTS, B, T, V, drawn

from andrea_jax.config import EXPERT_FIELDS, TRAINING_ONLY, ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.key_value_cache import decode_step, empty_cache, prefill
from andrea_jax.loss import loss_fn
from andrea_jax.model import hidden_forward, model_forward
from andrea_jax.parameters import abstract_params, path_name

ULP = 2.0**-23  # rounding: half a unit in the last of 24 bits, relative to the power of two below
COTANGENT = np.random.default_rng(2).standard_normal((B, T, V)).astype(np.float32)
UNROLLED = EngineConfig(attention="explicit", blocks="unroll")
QUICKLY = {"xla_backend_optimization_level": 0}  # the same arithmetic, compiled in half the time
IN_A_LOOP = EngineConfig(attention="blockwise", attention_block=6, blocks="scan", remat="block")


@functools.cache
def computed(name, engine):
    """(logits without and with segments, gradient of sum(COTANGENT logits) with them) of one compilation."""
    config = VARIANTS[name]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(params, segments):
        logits, vjp = jax.vjp(lambda p: model_forward(p, TOKENS, config, engine, segments), params)
        return logits, vjp(COTANGENT)[0]

    params = drawn(config)
    logits, gradient = both(params, SEGMENTS)
    return both(params, 0 * SEGMENTS)[0], logits, gradient


def assert_near(found, expected, ulps, name=""):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ulps * ULP * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_float64(name):
    config = VARIANTS[name]
    for segments, found in zip((None, SEGMENTS), computed(name, UNROLLED), strict=False):
        # At most three blocks of about ten sums each, every one off by a few ulp of the stream.
        assert_near(found, reference_model.logits(drawn(config), TOKENS, config, segments), 96)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_of_every_tensor_equals_central_differences_in_float64(name):
    config, rng = VARIANTS[name], np.random.default_rng(3)
    params = drawn(config)
    for path, grad in jax.tree.leaves_with_path(computed(name, UNROLLED)[2]):
        direction = rng.standard_normal(grad.shape)

        def along(h, path=path, direction=direction):
            moved = jax.tree.map_with_path(
                lambda p, x: np.asarray(x, np.float64) + (h * direction if p == path else 0), params
            )
            return (reference_model.logits(moved, TOKENS, config, SEGMENTS) * COTANGENT).sum()

        slope = (along(1e-5) - along(-1e-5)) / 2e-5  # off by about h^2 times the third derivative
        found = (np.asarray(grad, np.float64) * direction).sum()
        atol = 96 * ULP * np.linalg.norm(grad) * np.linalg.norm(direction)
        np.testing.assert_allclose(found, slope, rtol=1e-7, atol=atol, err_msg=path_name(path))
        trained = not path_name(path).endswith("router_bias")
        assert (np.linalg.norm(grad) > 0) == trained, path_name(path)


@pytest.mark.parametrize("name", VARIANTS)
def test_in_a_loop_recomputed_and_in_blocks_of_queries_it_is_the_same(name):
    """A layer is a traced number there, so a block with a window is chosen when it runs."""
    *logits, gradient = computed(name, UNROLLED)
    *others, other_gradient = computed(name, IN_A_LOOP)
    for found, expected in zip(others, logits, strict=True):
        assert_near(found, expected, 64)
    for (path, found), expected in zip(
        jax.tree.leaves_with_path(other_gradient), jax.tree.leaves(gradient), strict=True
    ):
        assert_near(found, expected, 96, path_name(path))


@pytest.mark.parametrize("name", ["gemma3", "alibi_window"])
def test_with_attention_recomputed_it_is_the_same(name):
    engine = dataclasses.replace(IN_A_LOOP, remat="attention")
    found, expected = (jax.tree.leaves(computed(name, e)) for e in (engine, UNROLLED))
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, 96)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere", "post_rms", "alibi_window"])
def test_bfloat16_logits_err_by_their_rounding(name):
    config = VARIANTS[name]
    engine = EngineConfig(dtype="bfloat16", attention="explicit")
    params, forward = drawn(config), jax.jit(lambda p: model_forward(p, TOKENS, config, engine))
    exact = reference_model.logits(params, TOKENS, config)
    rounded = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16"), np.float64), params)
    of_weights = np.linalg.norm(reference_model.logits(rounded, TOKENS, config) - exact)
    # Beside each product's weights its result is rounded, and the norms, turns, gates and sums around it: three or four
    # times as many numbers, so twice the error; and twice that for luck in so small a model.
    assert of_weights / 2 < np.linalg.norm(forward(params) - exact) < 4 * of_weights


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("blocks", ["scan", "unroll"])
def test_every_variant_keeps_the_dtype_of_activations(name, blocks):
    config, engine = VARIANTS[name], EngineConfig(dtype="bfloat16", blocks=blocks)
    params = abstract_params(config)
    x_BTD = jax.eval_shape(lambda p: hidden_forward(p, TOKENS, config, engine, SEGMENTS), params)
    assert (x_BTD.shape, x_BTD.dtype) == ((B, T, config.d_model), "bfloat16")
    cache = jax.eval_shape(lambda: empty_cache(B, config, engine))
    assert cache.k.shape == (config.n_layer, B, config.context_length, config.kv_heads, config.head_dim)
    filled = jax.eval_shape(lambda p, c: prefill(p, c, TOKENS, np.ones(B, bool), config, engine), params, cache)
    position = np.zeros(B, np.int32)
    logits, stepped = jax.eval_shape(lambda p, c: decode_step(p, c, position, position, config, engine), params, cache)
    assert filled == stepped == cache
    assert (logits.shape, logits.dtype) == ((B, V), "float32")


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_equal_the_full_forward(name):
    """Two rows, the second one token behind, from a prefill of three tokens on."""
    config, engine = VARIANTS[name], EngineConfig(dtype="float32")
    params, expected = drawn(config), np.asarray(computed(name, UNROLLED)[0])
    fill, step = (
        jax.jit(functools.partial(f, config=config, engine=engine), compiler_options=QUICKLY)
        for f in (prefill, decode_step)
    )
    cache = fill(params, empty_cache(B, config, engine), TOKENS[:, :3], np.ones(B, bool))
    for t in range(3, T):
        positions = np.array([t, t - 1], np.int32)
        found, cache = step(params, cache, TOKENS[np.arange(B), positions], positions)
        # As between two ways to compute the whole: sums in another order.
        assert_near(found, expected[np.arange(B), positions], 64)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "transformer", "rezero"])
def test_the_loss_is_of_the_logits(name):
    """Where these are scaled, capped, or end without a norm: of the loss, which never makes them all."""
    config = VARIANTS[name]
    targets = np.roll(TOKENS, -1, 1)
    batch = {"tokens_BT": TOKENS, "targets_BT": targets, "weights_BT": np.ones((B, T), np.float32)}
    loss, _ = jax.jit(lambda p: loss_fn(p, batch, config, UNROLLED), compiler_options=QUICKLY)(drawn(config))
    logits = np.asarray(computed(name, UNROLLED)[0], np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, nll.mean(), rtol=64 * ULP)


def test_every_option_is_in_a_variant():
    """Each choice, and another value than the default of each field; but for experts, which have tests of their own."""
    elsewhere = {"n_expert", *EXPERT_FIELDS, *TRAINING_ONLY}
    hints = typing.get_type_hints(ModelConfig)
    for field in (f for f in dataclasses.fields(ModelConfig) if f.name not in elsewhere):
        values, hint = {getattr(config, field.name) for config in VARIANTS.values()}, hints[field.name]
        if typing.get_origin(hint) is typing.Literal:
            assert values == set(typing.get_args(hint)), field.name
        assert values - {field.default}, field.name
