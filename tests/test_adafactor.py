"""Adafactor by the formulas of its paper, each matrix by itself, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax import ModelConfig, UserError
from andrea_jax.adafactor import join, split
from andrea_jax.optimizer import OptimizerConfig, group_of, make_optimizer
from andrea_jax.parameters import abstract_params, named_specs, path_name

ULP = 2.0**-23
MODEL = ModelConfig(
    vocab_size=150, context_length=4, d_model=128, n_layer=2, n_head=2, mlp_ratio=1.25, tie_embeddings=False
)
SPECS = named_specs(MODEL)
FACTORED = {"token_embedding", "head", *(name for name, spec in SPECS.items() if spec.matrix)}


def gradients(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.float32(scale * rng.standard_normal(x.shape)), abstract_params(MODEL))


def by_name(tree):
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree.leaves_with_path(tree)}


def matrices(name, x):
    """By hand: query, key and value of each layer are matrices of their own."""
    if name.endswith("qkv"):
        return x.transpose(0, 3, 1, 2, 4).reshape(6, 128, 128)
    if name.endswith("attention.out"):
        return x.reshape(2, 128, 128)
    return x if name.startswith("blocks") else x[None]


def adafactor(grads, b1, b2):
    """The direction after each gradient, by name, in matrices."""
    rows, columns, whole, mean = {}, {}, {}, {}
    for t, one in enumerate(grads, start=1):
        beta, directions = min(b2, 1 - t**-0.8), {}
        for name, g in one.items():
            g = matrices(name, g)
            square = g**2 + 1e-30
            if name in FACTORED:
                rows[name] = beta * rows.get(name, 0) + (1 - beta) * square.mean(2)
                columns[name] = beta * columns.get(name, 0) + (1 - beta) * square.mean(1)
                v = rows[name][:, :, None] * columns[name][:, None] / rows[name].mean(1)[:, None, None]
            else:
                v = whole[name] = beta * whole.get(name, 0) + (1 - beta) * square
            step = g / np.sqrt(v)
            axes = tuple(range(1, g.ndim))
            step = step / np.maximum(1, np.sqrt((step**2).mean(axes, keepdims=True)))
            mean[name] = b1 * mean.get(name, 0) + (1 - b1) * step
            directions[name] = mean[name] / (1 - b1**t)
        yield directions


@pytest.mark.parametrize(("b1", "b2"), [(0.0, 0.5), (0.9, 0.99)])
def test_several_steps_equal_float64(b1, b2):
    config = OptimizerConfig("adafactor", b1=b1, b2=b2, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(config, MODEL)
    grads = [gradients(seed, scale) for seed, scale in enumerate((1.0, 1e-3, 100.0, 1.0))]  # 100: the RMS is clipped
    state, update = optimizer.init(grads[0]), jax.jit(optimizer.update)
    for one, expected in zip(grads, adafactor(map(by_name, grads), b1, b2), strict=True):
        direction, state = update(one, state, one)
        for name, found in by_name(direction).items():
            # means of up to 160 squares, roots and quotients; t^-0.8 is off by an ulp or two
            atol = 64 * ULP * np.abs(expected[name]).max()
            np.testing.assert_allclose(matrices(name, found), expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", SPECS)
def test_pieces_put_together_are_the_tensor(name):
    spec = SPECS[name]
    x = jnp.arange(np.prod(spec.shape)).reshape(spec.shape)
    np.testing.assert_array_equal(join(split(x, spec), spec), x)
    np.testing.assert_array_equal(split(x, spec), matrices(name, np.asarray(x)))


def test_without_momentum_the_state_is_a_fortieth_of_the_parameters():
    """A row and a column for each matrix: (128 + 128) / 128^2 is 1/64 of one; vectors take 0.8 % more."""
    params = abstract_params(MODEL)
    count = sum(x.size for x in jax.tree.leaves(params))
    for b1, most in ((0.0, 0.025), (0.9, 1.025)):
        state = jax.eval_shape(make_optimizer(OptimizerConfig("adafactor", b1=b1), MODEL).init, params)
        assert sum(x.size for x in jax.tree.leaves(state)) < most * count


def test_it_steps_every_tensor():
    assert {group_of(OptimizerConfig("adafactor"), spec) for spec in SPECS.values()} == {"adafactor"}


def test_eps_is_refused():
    with pytest.raises(UserError, match=r"^optimizer\.eps = 0\.1 has no effect with optimizer\.kind = 'adafactor'$"):
        OptimizerConfig("adafactor", eps=0.1)
