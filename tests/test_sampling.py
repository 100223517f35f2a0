import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.sampling import Limits, SamplingConfig, choose_tokens, cut_logits
from andrea_jax.settings import UserError

choose = jax.jit(choose_tokens)
cut_off = jax.jit(cut_logits)
V = 37
ALL = np.ones(V, bool)
CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 1e-7},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.5},
    {"temperature": 0.4, "top_p": 0.97, "min_p": 0.02},
]


def limits(vocab_size: int = V, **changes) -> Limits:
    return SamplingConfig(**{"temperature": 1.0, **changes}).limits(vocab_size)


def reference_probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """float64, token by token, as the definitions read; logits are distinct."""
    order = np.argsort(-logits_V.astype(np.float64))
    scaled = logits_V.astype(np.float64)[order] / temperature
    p = np.exp(scaled - scaled[0])
    if top_k:
        p[top_k:] = 0
    p /= p.sum()
    needed, total = 0, 0.0
    while needed < len(p) and (needed == 0 or total < top_p):
        total += p[needed]
        needed += 1
    if top_p < 1:
        p[needed:] = 0
    p[p < min_p * p[0]] = 0
    result = np.zeros(len(p))
    result[order] = p / p.sum()
    return result


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_kept_tokens_and_their_probabilities_equal_numpy(cut):
    logits_BV = 3 * np.random.default_rng(0).standard_normal((50, V)).astype(np.float32)
    temperature = cut.get("temperature", 1.0)
    p_BV = jax.nn.softmax(cut_off(jnp.asarray(logits_BV / np.float32(temperature)), limits(**cut)), axis=-1)
    expected_BV = np.stack([reference_probabilities(row, **cut) for row in logits_BV])
    np.testing.assert_array_equal(np.asarray(p_BV) > 0, expected_BV > 0)
    np.testing.assert_allclose(p_BV, expected_BV, rtol=64 * 2**-23, atol=0)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, [0, 2]),
        ({"top_p": 0.74}, [0, 2]),
        ({"top_p": 0.76}, [0, 2, 3]),
        ({"top_p": 0.49}, [0]),
        ({"min_p": 0.28}, [0, 2, 3]),
        ({"top_k": 2, "top_p": 0.66}, [0]),  # 0.5 is two thirds of what top-k leaves
        ({"top_k": 2, "top_p": 0.68}, [0, 2]),
        ({"top_p": 0.74, "min_p": 0.6}, [0]),
    ],
    ids=str,
)
def test_hand_worked_cuts(cut, kept):
    logits_BV = jnp.log(jnp.array([[0.5, 0.1, 0.25, 0.15]]))
    assert np.flatnonzero(np.isfinite(cut_off(logits_BV, limits(4, **cut))[0])).tolist() == kept


def test_a_cut_does_not_separate_equal_tokens():
    logits_BV = jnp.array([[0.0, 1.0, 1.0, 1.0, -1.0]])
    for cut in ({"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}):
        assert np.flatnonzero(np.isfinite(cut_off(logits_BV, limits(5, **cut))[0])).tolist() == [1, 2, 3]


def test_more_top_k_than_tokens_cuts_nothing():
    logits_BV = jax.random.normal(jax.random.key(0), (3, V))
    for top_k in (0, V, V + 1, 2**31 - 1):
        np.testing.assert_array_equal(cut_off(logits_BV, limits(top_k=top_k)), logits_BV)


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_samples_follow_the_distribution(cut):
    draws = 20_000
    logits_V = np.random.default_rng(1).standard_normal(V).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), draws)
    tokens = choose(keys, jnp.tile(logits_V, (draws, 1)), ALL, limits(**cut))
    counts, expected = np.bincount(tokens, minlength=V), draws * reference_probabilities(logits_V, **cut)
    assert np.all(counts[expected == 0] == 0)
    likely = expected > 0
    freedom = likely.sum() - 1
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_row_depends_on_its_own_key_only():
    logits_BV = jax.random.normal(jax.random.key(0), (6, V))
    keys_B = jax.random.split(jax.random.key(1), 6)
    together = choose(keys_B, logits_BV, ALL, limits())
    alone = [int(choose(keys_B[i : i + 1], logits_BV[i : i + 1], ALL, limits())[0]) for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 1e-38, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_a_token_that_is_not_allowed_is_never_chosen(temperature, size):
    logits_BV = size * jax.random.normal(jax.random.key(0), (500, V)) + jnp.linspace(0, 8 * size, V)
    allowed_V = np.arange(V) < 9
    keys_B = jax.random.split(jax.random.key(1), 500)
    for cut in ({}, {"top_k": 30}, {"top_p": 0.999}, {"min_p": 1e-6}):
        tokens_B = choose(keys_B, logits_BV, allowed_V, limits(temperature=temperature, **cut))
        assert np.all((tokens_B >= 0) & (tokens_B < 9))
        if temperature < 1e-30:
            np.testing.assert_array_equal(tokens_B, logits_BV[:, :9].argmax(-1))


def test_the_first_of_equal_largest_is_chosen_at_temperature_0():
    tokens_B = choose(
        jax.random.split(jax.random.key(0), 1), jnp.array([[0.0, 2.0, 2.0]]), np.ones(3, bool), limits(3, temperature=0)
    )
    assert tokens_B.tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_minus_1_in_their_row_only(bad, temperature):
    logits_BV = jnp.zeros((3, V)).at[1, 4].set(bad)
    tokens_B = choose(jax.random.split(jax.random.key(0), 3), logits_BV, ALL, limits(temperature=temperature))
    assert (np.asarray(tokens_B) == -1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "sample.temperature = -0.1: must be at least 0"),
        ({"temperature": float("nan")}, "sample.temperature = nan: must be finite"),
        ({"top_p": 0.0}, "sample.top_p = 0.0: must be above 0"),
        ({"top_p": 1.1}, "sample.top_p = 1.1: must be at most 1"),
        ({"top_k": -1}, "sample.top_k = -1: must be at least 0"),
        ({"top_k": 2.5}, "sample.top_k = 2.5: expected a whole number"),
        ({"min_p": 1.5}, "sample.min_p = 1.5: must be at most 1"),
        ({"stop": ("a", "")}, "sample.stop: an empty text"),
        ({"stop": "a"}, "sample.stop = 'a': expected a tuple"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        SamplingConfig(**setting)
