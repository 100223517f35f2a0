"""Muon by the parameter specs: each matrix by itself, everything else by AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax import ModelConfig, UserError
from andrea_jax.optimizer import OptimizerConfig, make_optimizer
from andrea_jax.parameters import abstract_params, path_name

MODEL = ModelConfig(
    vocab_size=11, context_length=4, d_model=12, n_layer=2, n_head=3, tie_embeddings=False, attention_bias=True
)
MUON = OptimizerConfig("muon", weight_decay=0.0, clip_norm=None)


@pytest.fixture(scope="module")
def gradient():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.float32(rng.standard_normal(x.shape)), abstract_params(MODEL))


def first_direction(config, gradient):
    optimizer = make_optimizer(config, MODEL)
    direction, _ = jax.jit(optimizer.update)(gradient, optimizer.init(gradient), gradient)
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree.leaves_with_path(direction)}


def matrices(name, tensor):
    """[count, inputs, outputs]: a matrix for each layer, and for each of query, key and value."""
    if name.endswith("qkv"):
        return tensor.transpose(0, 3, 1, 2, 4).reshape(-1, 12, 12)
    return tensor.reshape(2, -1, tensor.shape[-1]) if name.endswith("out") else tensor


NAMES = ["blocks.attention.qkv", "blocks.attention.out", "blocks.mlp.w_1", "blocks.mlp.w_2"]


@pytest.mark.parametrize("name", NAMES)
def test_each_matrix_of_each_layer_is_orthogonalised_by_itself(gradient, name):
    """Jordan's quintic, five times, on the singular values of slope / Frobenius norm: U p(S) V^T in float64."""
    direction = first_direction(MUON, gradient)[name]
    given = {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree.leaves_with_path(gradient)}[name]
    for step, slope in zip(matrices(name, direction), matrices(name, given), strict=True):
        u, s, vt = np.linalg.svd(slope, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        expected = (u * s) @ vt * 0.2 * np.sqrt(max(step.shape))
        # each of five steps multiplies a small singular value, and its error, by 3.4445 at most
        np.testing.assert_allclose(step, expected, rtol=0, atol=3.5**5 * 12 * 2.0**-24 * np.abs(expected).max())


def test_a_muon_step_is_about_as_large_as_an_adam_step(gradient):
    """U V^T of a d x 4d matrix has root mean square 1/sqrt(4d); times 0.2 sqrt(4d) that is 0.2, Adam's in practice."""
    rms = np.sqrt(np.square(first_direction(MUON, gradient)["blocks.mlp.w_1"]).mean())
    assert 0.68 * 0.2 < rms < 1.13 * 0.2


def test_everything_else_takes_the_step_of_adamw(gradient):
    muon, adamw = (
        first_direction(MUON, gradient),
        first_direction(OptimizerConfig("adamw", weight_decay=0.0, clip_norm=None), gradient),
    )
    for name in muon.keys() - set(NAMES):
        np.testing.assert_array_equal(muon[name], adamw[name], err_msg=name)
    for name in NAMES:
        assert not np.allclose(muon[name], adamw[name])


def test_momentum_is_nesterovs(gradient):
    """The second direction of a constant gradient is the first; with another gradient it is between both."""
    optimizer = make_optimizer(MUON, MODEL)
    first, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    same, _ = optimizer.update(gradient, state, gradient)
    opposite, _ = optimizer.update(jax.tree.map(jnp.negative, gradient), state, gradient)
    a, b, c = (np.asarray(t["blocks"]["mlp"]["w_1"]) for t in (first, same, opposite))
    np.testing.assert_allclose(a, b, atol=1e-4)
    assert (a * c).sum() < 0.5 * (a * a).sum()


def test_momentum_without_muon_is_refused():
    with pytest.raises(UserError, match=r"optimizer\.momentum = 0\.9 has no effect with optimizer\.kind = 'adamw'"):
        OptimizerConfig("adamw", momentum=0.9)
