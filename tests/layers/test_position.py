import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model

from andrea_jax.config import ModelConfig
from andrea_jax.layers.position import alibi_slopes, rotary_frequencies, rotate

ULP = 2.0**-23
T, N, H = 40, 2, 8
ROTARY = ModelConfig(context_length=64, d_model=N * H, n_head=N, position="rotary")
X = np.random.default_rng(0).standard_normal((2, T, N, H)).astype(np.float32)
LLAMA_31 = dict(rotary_base=500_000.0, rotary_scaling="llama3", rotary_factor=8.0, rotary_original=8192)


def changed(**changes):
    return dataclasses.replace(ROTARY, **changes)


def of_width(head_size, **changes):
    return ModelConfig(head_size=head_size, position="rotary", **changes)


def turned(x, positions, config, sees_all=True):
    """In float64, one position and head at a time."""
    layer = 0 if sees_all == reference_model.is_global(0, config) else config.global_every - 1
    thetas, length = reference_model.frequencies(layer, config)
    x = np.asarray(x, np.float64)
    z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * np.outer(positions, thetas))[:, None] * length
    return np.concatenate([z.real, z.imag], -1)


def test_frequencies_of_the_paper():
    """theta_i = 10000^(-2i/d): 1 and 1/100 for d = 4; wavelengths from 2 pi to 10000 2 pi, short of the last step."""
    frequencies, length = rotary_frequencies(of_width(4))
    np.testing.assert_allclose(frequencies, [1, 0.01], rtol=2 * ULP)
    assert length == 1
    wavelengths = 2 * math.pi / rotary_frequencies(of_width(128))[0]
    assert wavelengths[0] == pytest.approx(6.2832, rel=1e-4)
    assert (
        wavelengths[-1] == pytest.approx(2 * math.pi * 10_000 ** (126 / 128), rel=1e-5) == pytest.approx(54410, abs=1)
    )


SCALINGS = {
    "none": dict(),
    "linear": dict(rotary_scaling="linear", rotary_factor=4.0),
    "llama 3.1": LLAMA_31 | dict(head_size=128),
    "llama 3.2": LLAMA_31 | dict(rotary_factor=32.0, head_size=64),
    "llama3, narrow": LLAMA_31 | dict(rotary_slow=1.5, rotary_fast=1.6, head_size=32),
    "yarn": dict(rotary_scaling="yarn", rotary_factor=16.0, rotary_original=4096, rotary_fast=32.0, head_size=128),
    "yarn, its context": dict(rotary_scaling="yarn", rotary_factor=2.0, context_length=2048, head_size=64),
    "yarn, told its length": dict(rotary_scaling="yarn", rotary_factor=2.0, rotary_length=1.5, head_size=64),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_the_formulas_in_float64(name):
    config = changed(**SCALINGS[name])
    frequencies, length = rotary_frequencies(config)
    expected, expected_length = reference_model.frequencies(0, config)
    assert frequencies.dtype == np.float32
    # base^x in float32 is off by the rounding of x ln(base), a few ulp of 13.
    np.testing.assert_allclose(frequencies, expected, rtol=16 * ULP)
    assert length == pytest.approx(expected_length, rel=1e-12)


def test_llama_3_by_hand():
    """Of a context of 8,192: wavelengths up to 2,048 stay, those from 8,192 on are 8 times as long."""
    config = of_width(128, **LLAMA_31)
    plain = rotary_frequencies(of_width(128, rotary_base=500_000.0))[0]
    scaled = rotary_frequencies(config)[0]
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 2048, wavelengths > 8192
    # 2 pi 500000^(i/64) is below 2048 up to i = 28.2, and above 8192 from i = 34.98 on
    assert short.sum() == 29
    assert long.sum() == 29
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=2 * ULP)
    between = ~short & ~long
    assert np.all((scaled[between] > plain[between] / 8) & (scaled[between] < plain[between]))
    assert np.all(np.diff(scaled) < 0)


def test_yarn_by_hand():
    """Of a context of 2,048 and heads of 64, frequency i turns 2048 / (2 pi) 10000^(-i/32) times: 32 times at i = 8.08,
    once at i = 20.1. So 0 to 8 stay, from 21 on they are divided, and 12 is 4/13 of the way."""
    config = of_width(64, rotary_scaling="yarn", rotary_factor=16.0, rotary_original=2048, rotary_fast=32.0)
    plain, (scaled, length) = rotary_frequencies(of_width(64))[0], rotary_frequencies(config)
    np.testing.assert_allclose(scaled[:9], plain[:9], rtol=2 * ULP)
    np.testing.assert_allclose(scaled[21:], plain[21:] / 16, rtol=2 * ULP)
    np.testing.assert_allclose(scaled[12], plain[12] * (9 / 13 + 4 / 13 / 16), rtol=4 * ULP)
    assert length == pytest.approx(1.2773, abs=1e-4)  # 0.1 ln 16 + 1


@pytest.mark.parametrize("name", ["none", "linear", "yarn, its context"])
def test_rotation_equals_float64(name):
    config = changed(**SCALINGS[name] | dict(head_size=H))
    positions = np.arange(T) + 7
    found = rotate(jnp.asarray(X), jnp.asarray(positions), config, True)
    # An angle of 47 is off by a few of its ulp, which are 32 of those of 1.
    np.testing.assert_allclose(found, turned(X, positions, config), rtol=0, atol=4 * 32 * ULP)


def test_scores_depend_on_distance_only_and_lengths_stay():
    """The property that the paper starts from: <R_m q, R_n k> = g(q, k, m - n)."""
    q, k = jnp.asarray(X[:1, :1]), jnp.asarray(X[1:, 1:2])

    def score(m, n):
        (turned_q,), (turned_k,) = (rotate(x, jnp.array([p]), ROTARY, True)[0] for x, p in ((q, m), (k, n)))
        return np.asarray((turned_q * turned_k).sum(-1))

    for m, n in ((9, 4), (5, 0), (60, 55)):
        np.testing.assert_allclose(score(m, n), score(5, 0), rtol=0, atol=8 * 64 * ULP)  # the ulp of angles up to 60
    assert np.all(np.abs(score(6, 0) - score(5, 0)) > 1e-2)
    lengths = np.linalg.norm(rotate(jnp.asarray(X), jnp.arange(T), ROTARY, True), axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(X, axis=-1), rtol=8 * ULP)
    np.testing.assert_array_equal(rotate(jnp.asarray(X), jnp.zeros(T, int), ROTARY, True), X)


def test_linear_scaling_is_interpolation_of_positions():
    stretched = changed(rotary_scaling="linear", rotary_factor=4.0)
    found = rotate(jnp.asarray(X), 4 * jnp.arange(T), stretched, True)
    np.testing.assert_allclose(found, rotate(jnp.asarray(X), jnp.arange(T), ROTARY, True), rtol=0, atol=4 * 32 * ULP)


def test_each_text_may_have_positions_of_its_own():
    positions = np.stack([np.arange(T), 3 + np.arange(T)[::-1]])
    found = rotate(jnp.asarray(X), jnp.asarray(positions), ROTARY, True)
    for row in range(2):
        np.testing.assert_array_equal(
            found[row], rotate(jnp.asarray(X[row]), jnp.asarray(positions[row]), ROTARY, True)
        )


def test_blocks_with_a_window_turn_by_a_base_of_their_own_and_without_scaling():
    config = changed(window=4, global_every=2, rotary_local_base=50.0, rotary_scaling="yarn", rotary_factor=3.0)
    traced = jax.jit(lambda sees_all: rotate(jnp.asarray(X), jnp.arange(T), config, sees_all))
    for sees_all in (True, False):
        found = rotate(jnp.asarray(X), jnp.arange(T), config, sees_all)
        np.testing.assert_allclose(found, turned(X, np.arange(T), config, sees_all), rtol=0, atol=4 * 32 * ULP)
        np.testing.assert_allclose(traced(sees_all), found, rtol=0, atol=8 * ULP)


def test_angles_of_half_precision_vectors_are_exact_also_far_out():
    """In bfloat16 itself, position 1,001 would be 1,000 and its angle off by 1."""
    config, positions = changed(context_length=2048), 1000 + np.arange(T)
    x = jnp.asarray(X, jnp.bfloat16)
    found = rotate(x, jnp.asarray(positions), config, True)
    assert found.dtype == jnp.bfloat16
    expected = turned(x.astype(jnp.float32), positions, config)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=2 * 1024 * ULP)


def test_alibi_slopes_of_the_paper():
    np.testing.assert_array_equal(alibi_slopes(8), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    np.testing.assert_allclose(alibi_slopes(16), 2.0 ** -np.arange(0.5, 8.5, 0.5), rtol=ULP)
    # 12: the eight of 8, then of the sixteen of 16 the first, third, fifth and seventh
    np.testing.assert_array_equal(alibi_slopes(12)[:8], alibi_slopes(8))
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rtol=ULP)


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_slopes_of_any_number_of_heads(heads):
    slopes = alibi_slopes(heads)
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, reference_model.slopes(heads), rtol=4 * ULP)
