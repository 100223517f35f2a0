import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.optimizer import OptimizerConfig, make_optimizer
from andrea_jax.parameters import abstract_params, path_name
from andrea_jax.settings import UserError

ULP = 2.0**-23
MODEL = ModelConfig(vocab_size=11, context_length=4, d_model=8, n_layer=2, n_head=2, tie_embeddings=False)
DECAYED = {"blocks.attention.qkv", "blocks.attention.out", "blocks.mlp.w_1", "blocks.mlp.w_2", "head"}


def like_params(rng, scale=1.0):
    return jax.tree.map(lambda x: jnp.float32(scale * rng.standard_normal(x.shape)), abstract_params(MODEL))


def by_name(tree):
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree.leaves_with_path(tree)}


def adamw(params, gradients, config, rate):
    """AdamW with a clip by the global norm, on float64 arrays by name; the parameters after each step."""
    m = {name: np.zeros(p.shape) for name, p in params.items()}
    v = {name: np.zeros(p.shape) for name, p in params.items()}
    for t, grads in enumerate(gradients, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = min(1, config.clip_norm / norm) if config.clip_norm else 1
        for name, g in grads.items():
            m[name] = config.b1 * m[name] + (1 - config.b1) * shrink * g
            v[name] = config.b2 * v[name] + (1 - config.b2) * (shrink * g) ** 2
            step = m[name] / (1 - config.b1**t) / (np.sqrt(v[name] / (1 - config.b2**t)) + config.eps)
            decay = config.weight_decay * params[name] if name in DECAYED else 0
            params = {**params, name: params[name] - rate * (step + decay)}
        yield params


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig("adamw", b1=0.9, b2=0.99, weight_decay=0.1, clip_norm=1.0),
        OptimizerConfig("adamw", b1=0.8, b2=0.95, eps=1e-2, weight_decay=0.0, clip_norm=None),
        OptimizerConfig("adamw", b1=0.0, b2=0.5, weight_decay=2.0, clip_norm=1e9),
    ],
)
def test_several_steps_equal_float64(config):
    rng, rate = np.random.default_rng(0), 0.01
    params = like_params(rng)
    gradients = [like_params(rng, scale) for scale in (1.0, 1e-4, 30.0, 1e-2)]  # both sides of the clip
    optimizer = make_optimizer(config, MODEL)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    expected = adamw(by_name(params), [by_name(g) for g in gradients], config, rate)
    for grads, wanted in zip(gradients, expected, strict=True):
        direction, state = update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        for name, p in by_name(params).items():
            # 1 - b2^t in float32 is off by up to t ulp / (1 - b2), and the root halves that; the step is of size rate.
            atol = rate * (4 * ULP / (1 - config.b2) + 32 * ULP) * max(1, np.abs(p).max())
            np.testing.assert_allclose(p, wanted[name], rtol=4 * ULP, atol=atol, err_msg=name)


def test_the_clip_takes_the_norm_over_all_tensors_together():
    """With b1 = b2 = 0 and a large eps the direction is the clipped gradient / eps."""
    optimizer = make_optimizer(
        OptimizerConfig("adamw", b1=0.0, b2=0.0, eps=1e9, weight_decay=0.0, clip_norm=2.0), MODEL
    )
    grads = like_params(np.random.default_rng(1))
    direction, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    clipped = {name: 1e9 * d for name, d in by_name(direction).items()}
    norms = {name: np.linalg.norm(d) for name, d in clipped.items()}
    assert np.linalg.norm(list(norms.values())) == pytest.approx(2.0, rel=1e-6)
    assert max(norms.values()) < 1.9  # no tensor was clipped for itself
    factors = np.concatenate([(clipped[name] / g).ravel() for name, g in by_name(grads).items()])
    np.testing.assert_allclose(factors, factors[0], rtol=32 * ULP)


def test_decay_moves_the_matrices_only():
    params = like_params(np.random.default_rng(2))
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(OptimizerConfig("adamw", weight_decay=0.5), MODEL)
    direction, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
    before = by_name(params)
    for name, d in by_name(direction).items():
        np.testing.assert_array_equal(d, 0.5 * before[name] if name in DECAYED else 0, err_msg=name)


def test_the_moments_are_float32_and_shaped_like_the_parameters():
    params = like_params(np.random.default_rng(3))
    adam = next(s for s in make_optimizer(OptimizerConfig("adamw"), MODEL).init(params) if hasattr(s, "mu"))
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), moments) == jax.tree.map(lambda x: (x.shape, x.dtype), params)


@pytest.mark.parametrize(
    ("field", "value"), [("b1", 1.0), ("b2", -0.1), ("clip_norm", 0.0), ("weight_decay", -1), ("eps", "small")]
)
def test_settings_outside_their_range_are_refused(field, value):
    with pytest.raises(UserError, match=rf"^optimizer\.{field} = "):
        OptimizerConfig(**{field: value})
