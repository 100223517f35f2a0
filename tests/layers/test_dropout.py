import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.layers.dropout import dropout

KEY = jax.random.key(0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_the_rate_and_the_rest_is_scaled_up(rate):
    y = np.asarray(dropout(jnp.ones(20_000), rate, KEY))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(1 - rate)}
    share, standard_error = (y == 0).mean(), (rate * (1 - rate) / y.size) ** 0.5
    assert abs(share - rate) < 5 * standard_error
    # Each element is kept or dropped for itself: neighbours agree as often as independent draws do.
    agree = ((y[1:] == 0) == (y[:-1] == 0)).mean()
    assert abs(agree - rate**2 - (1 - rate) ** 2) < 5 * 0.5 / y.size**0.5


def test_without_a_key_or_a_rate_it_returns_its_input():
    x = jnp.arange(3.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, KEY) is x


def test_the_key_decides_the_mask():
    x = jnp.ones((8, 64))
    np.testing.assert_array_equal(dropout(x, 0.5, KEY), dropout(x, 0.5, jax.random.key(0)))
    assert np.any(dropout(x, 0.5, KEY) != dropout(x, 0.5, jax.random.key(1)))


def test_the_gradient_is_zero_where_dropped_and_scaled_where_kept():
    x = jax.random.normal(KEY, (100,))
    y, vjp = jax.vjp(lambda x: dropout(x, 0.25, KEY), x)
    np.testing.assert_array_equal(vjp(jnp.full(100, 3.0))[0], np.where(y == 0, 0, np.float32(3) / np.float32(0.75)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_kept_and_nan_is_dropped_too(dtype):
    y = dropout(jnp.full(64, jnp.nan, dtype), 0.5, KEY)
    assert y.dtype == dtype
    assert 0 < int((y == 0).sum()) < 64
