import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.loss import loss_fn
from andrea_jax.model import model_forward
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import abstract_params, decay_mask, path_name
from andrea_jax.schedule import ScheduleConfig, make_schedule
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import State, abstract_state, init_state
from andrea_jax.train.step import loss_and_gradient, make_train_step

ULP = 2.0**-23
B, T, V = 4, 6, 19
MODEL = ModelConfig(vocab_size=V, context_length=T, d_model=8, n_layer=2, n_head=2)
CONFIG = RunConfig(
    model=MODEL,
    train=TrainConfig(steps=10, batch_size=B, z_loss=1e-3),
    optimizer=OptimizerConfig("adamw", b2=0.99, clip_norm=0.5),
    schedule=ScheduleConfig(peak=0.01, floor=0.1, warmup=4),
    engine=EngineConfig(blocks="scan"),
)
DROPOUT = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, dropout=0.5))


def with_train(config, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def state_of(config, step=0):
    """A state with random parameters, made without init_state's compilations."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_state(config))
    params = jax.tree.map(lambda x: jnp.float32(0.3 * rng.standard_normal(x.shape)), abstract_params(config.model))
    return zeros.replace(step=jnp.int32(step), params=params)


def batch(seed=0, weights=None):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    weights = rng.uniform(0, 2, (B, T)) if weights is None else weights
    return {
        "tokens_BT": jnp.asarray(tokens[:, :-1]),
        "targets_BT": jnp.asarray(tokens[:, 1:]),
        "weights_BT": jnp.float32(weights),
    }


def bits_equal(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


@pytest.fixture(scope="module")
def step():
    return jax.jit(make_train_step(CONFIG))


@pytest.fixture(scope="module")
def dropout_step():
    return jax.jit(make_train_step(DROPOUT))


def test_three_steps_equal_optax_adamw(step):
    schedule = make_schedule(CONFIG.schedule, 10)
    mask = decay_mask(MODEL)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=mask))

    @jax.jit
    def peer_step(params, state, batch):
        def loss(params):
            logits = model_forward(params, batch["tokens_BT"], MODEL)
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets_BT"])
            each = nll + 1e-3 * jax.nn.logsumexp(logits, axis=-1) ** 2
            return (each * batch["weights_BT"]).sum() / batch["weights_BT"].sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    state = state_of(CONFIG)
    params, peer = state.params, optimizer.init(state.params)
    for t in range(3):
        state, metrics = step(state, batch(t))
        params, peer, loss, norm = peer_step(params, peer, batch(t))
        assert int(state.step) == t + 1
        np.testing.assert_allclose(metrics["loss"], loss, rtol=32 * ULP)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=64 * ULP)
        np.testing.assert_allclose(metrics["learning_rate"], schedule(t), rtol=4 * ULP)
        for (path, found), expected in zip(
            jax.tree.leaves_with_path(state.params), jax.tree.leaves(params), strict=True
        ):
            # Adam divides a gradient by its own size: where that is below 10^-4 of the largest, rounding is 10^-3 of a
            # step of 0.01. A wrong order, sign, mask or schedule moves by a step.
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=path_name(path))


def test_accumulated_parts_equal_the_whole_batch():
    weights = np.random.default_rng(1).uniform(0, 2, (B, T)) * np.array([[1], [0.01], [0], [3]])  # a part may be empty
    data, params = batch(0, weights), state_of(CONFIG).params
    whole, parted = (
        jax.jit(partial(loss_and_gradient, config=with_train(CONFIG, accumulate=parts), dropout_key=None))(params, data)
        for parts in (1, 4)
    )
    for (path, found), expected in zip(jax.tree.leaves_with_path(parted), jax.tree.leaves(whole), strict=True):
        atol = 32 * ULP * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=path_name(path))


def test_a_batch_without_weight_changes_no_parameter_but_by_decay(step):
    before = state_of(CONFIG)
    after, metrics = step(before, batch(0, np.zeros((B, T))))
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"], bool(metrics["finite"])) == (0, 0, 0, True)
    bits_equal(after.params["token_embedding"], before.params["token_embedding"])


def test_the_metrics_say_what_was_done(step):
    before, data = state_of(CONFIG, step=2), batch()
    after, metrics = step(before, data)
    loss, aux = jax.jit(partial(loss_fn, config=MODEL, z_loss=1e-3))(before.params, data)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=16 * ULP)
    np.testing.assert_allclose(metrics["nll"], aux["nll"] / aux["weight"], rtol=16 * ULP)
    np.testing.assert_allclose(metrics["tokens"], np.asarray(data["weights_BT"], np.float64).sum(), rtol=8 * ULP)
    squares = [np.square(np.asarray(p, np.float64)).sum() for p in jax.tree.leaves(after.params)]
    np.testing.assert_allclose(metrics["param_norm"], sum(squares) ** 0.5, rtol=16 * ULP)
    assert float(metrics["learning_rate"]) == pytest.approx(0.01 * 3 / 4 * (0.1 + 0.9 * (1 + np.cos(np.pi * 0.2)) / 2))
    assert bool(metrics["finite"])
    assert all(x.shape == () for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize("where", ["nan gain", "huge head", "infinite weight"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(step, where):
    state, _ = step(state_of(CONFIG), batch())  # so that the moments are not zero
    data, params = batch(1), state.params
    if where == "nan gain":
        params = {
            **params,
            "final_norm": {**params["final_norm"], "gain": params["final_norm"]["gain"].at[3].set(jnp.nan)},
        }
    elif where == "huge head":
        params = {**params, "token_embedding": params["token_embedding"].at[:, 0].set(3e38)}
    else:
        data = {**data, "weights_BT": data["weights_BT"].at[0, 0].set(jnp.inf)}
    before = state.replace(params=params)
    after, metrics = step(before, data)
    assert not bool(metrics["finite"])
    assert int(after.step) == int(before.step) + 1
    bits_equal((after.params, after.optimizer), (before.params, before.optimizer))
    recovered, metrics = step(after.replace(params=state.params), batch(1))
    assert bool(metrics["finite"])
    assert np.any(recovered.params["blocks"]["mlp"]["w_1"] != state.params["blocks"]["mlp"]["w_1"])


def test_the_same_state_and_batch_twice_give_the_same_bits(dropout_step):
    bits_equal(dropout_step(state_of(DROPOUT), batch()), dropout_step(state_of(DROPOUT), batch()))


def test_a_donated_state_gives_the_same_run(step):
    donating = jax.jit(make_train_step(CONFIG), donate_argnums=0)
    kept, given = state_of(CONFIG), state_of(CONFIG)
    for t in range(3):
        old = given
        given, _ = donating(given, batch(t))
        kept, _ = step(kept, batch(t))
        assert old.params["token_embedding"].is_deleted()
    bits_equal(kept, given)


def test_dropout_differs_from_step_to_step(dropout_step):
    losses = [float(dropout_step(state_of(DROPOUT, step), batch())[1]["loss"]) for step in (0, 1, 2, 1)]
    assert losses[1] == losses[3]
    assert len(set(losses)) == 3


def test_the_largest_seed_and_step_run():
    config = with_train(DROPOUT, seed=2**31 - 1)
    state = jax.eval_shape(make_train_step(config), abstract_state(config), batch())[0]
    assert state.step.dtype == jnp.int32


def test_dropout_is_of_a_row_whichever_part_or_device_has_it():
    """Parts give the whole batch's gradient, mask for mask; rows whose places are swapped do not."""
    key, data, params = jax.random.key(5), batch(0, np.ones((B, T))), state_of(DROPOUT).params
    whole, parted = (
        jax.jit(partial(loss_and_gradient, config=with_train(DROPOUT, accumulate=parts), dropout_key=key))
        for parts in (1, 4)
    )
    expected = whole(params, data)
    for (path, found), wanted in zip(
        jax.tree.leaves_with_path(parted(params, data)), jax.tree.leaves(expected), strict=True
    ):
        atol = 32 * ULP * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=path_name(path))
    swapped = jax.tree.map(lambda x: x[::-1], data)  # the same rows, each under another's mask
    assert abs(float(whole(params, swapped)[0] - expected[0])) > 1e-3


def test_a_batch_that_does_not_divide_into_parts_is_refused():
    with pytest.raises(UserError, match=r"^train\.batch_size = 8 does not divide into train\.accumulate = 3 parts"):
        TrainConfig(batch_size=8, accumulate=3)


def test_the_first_state_follows_from_the_seed():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, n_layer=1, d_model=4))
    one, same, other = (init_state(with_train(config, seed=seed)) for seed in (0, 0, 1))
    bits_equal(one, same)
    assert np.any(one.params["token_embedding"] != other.params["token_embedding"])
    assert int(one.step) == 0
    assert isinstance(one, State)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_state(config)
    )
