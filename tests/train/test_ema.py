"""The average of the parameters: its formula, what uses it, and that it survives a checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest

from andrea_jax import ModelConfig, UserError, load_checkpoint
from andrea_jax.checkpoint import open_for_saving, restore_state, save, saved_items
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.inspect.compare_runs import compare_checkpoints
from andrea_jax.inspect.state_hash import state_hashes
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import abstract_state, init_state
from andrea_jax.train.step import make_train_step

ULP = 2.0**-23
MODEL = ModelConfig(vocab_size=257, context_length=8, d_model=8, n_layer=1, n_head=2)
PLAIN = RunConfig(
    MODEL,
    TrainConfig(batch_size=2),
    optimizer=OptimizerConfig("adamw"),
    schedule=ScheduleConfig("constant", peak=0.1, warmup=0),
)
AVERAGED = dataclasses.replace(PLAIN, train=dataclasses.replace(PLAIN.train, ema=0.6))
META = {"model": dataclasses.asdict(MODEL), "tokenizer": bytes_tokenizer().to_dict(), "settings": {}}
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 9))
BATCH = {"tokens_BT": TOKENS[:, :-1], "targets_BT": TOKENS[:, 1:], "weights_BT": np.ones((2, 8), np.float32)}


@pytest.fixture(scope="module")
def states():
    """The start, and the states after each of fifteen steps."""
    step, made = jax.jit(make_train_step(AVERAGED)), [init_state(AVERAGED)]
    for _ in range(15):
        made.append(step(made[-1], BATCH)[0])
    return made


@pytest.fixture(scope="module")
def folder(states, tmp_path_factory):
    """Step 1 without an average, step 15 with."""
    folder = tmp_path_factory.mktemp("run")
    with open_for_saving(folder / "checkpoints", keep_last=2) as manager:
        save(manager, states[1].replace(average=None), META, 1.0)
        save(manager, states[-1], META, 2.0)
    return folder


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


def test_it_is_the_exponential_average_with_a_decay_that_starts_small(states):
    """Decays 1/10, 2/11, ... up to 0.6 = (1 + 12.5) / (10 + 12.5): from step 14 on."""
    mean = np.asarray(states[0].params["token_embedding"], np.float64)
    for t, state in enumerate(states[1:]):
        decay = min(0.6, (1 + t) / (10 + t))
        mean = decay * mean + (1 - decay) * np.asarray(state.params["token_embedding"], np.float64)
        # one sum and two products a step, of which at most 1 / (1 - 0.6) steps count
        atol = 8 * ULP * np.abs(mean).max()
        np.testing.assert_allclose(state.average["token_embedding"], mean, rtol=0, atol=atol)


def test_the_parameters_themselves_are_those_of_a_run_without_it(states):
    state, step = init_state(PLAIN), jax.jit(make_train_step(PLAIN))
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert state.average is None
    assert equal(state.params, states[3].params)
    assert state.evaluated is state.params
    assert states[3].evaluated is states[3].average


def test_a_step_that_is_not_finite_leaves_it(states):
    broken = {**BATCH, "weights_BT": np.full((2, 8), np.nan, np.float32)}
    after, metrics = jax.jit(make_train_step(AVERAGED))(states[3], broken)
    assert not metrics["finite"]
    assert equal((after.params, after.average), (states[3].params, states[3].average))


def test_the_first_average_is_no_alias_of_the_parameters(states):
    """Both are donated to the first step."""
    step = jax.jit(make_train_step(AVERAGED), donate_argnums=0)
    assert equal(step(init_state(AVERAGED), BATCH)[0], states[1])


def test_a_checkpoint_holds_both_and_gives_what_is_asked_for(folder, states):
    last = states[-1]
    assert equal(restore_state(folder / "checkpoints", 15, abstract_state(AVERAGED)), last)
    assert equal(load_checkpoint(folder)[0], last.average)
    assert equal(load_checkpoint(folder, weights="average")[0], last.average)
    assert equal(load_checkpoint(folder, weights="last")[0], last.params)
    assert not equal(last.params, last.average)
    assert equal(load_checkpoint(folder, step=1)[0], states[1].params)
    with pytest.raises(UserError, match=r"checkpoints/1 has no averaged weights; a run keeps them with train\.ema"):
        load_checkpoint(folder, step=1, weights="average")


def test_an_average_that_begins_later_starts_as_the_parameters(folder, states):
    found = restore_state(folder / "checkpoints", 1, abstract_state(AVERAGED))
    assert equal(found.average, states[1].params)
    assert restore_state(folder / "checkpoints", 15, abstract_state(PLAIN)).average is None


def test_damage_to_it_is_seen(folder, states, tmp_path):
    wrong = jax.tree.map(lambda x: x + 1, states[1].average)
    with open_for_saving(tmp_path / "checkpoints", keep_last=1) as manager:
        save(manager, states[1], META, None)
    with open_for_saving(tmp_path / "other", keep_last=1) as manager:
        save(manager, states[1].replace(average=wrong), META, None)
    item = tmp_path / "checkpoints" / "1" / "average"
    item.rename(tmp_path / "aside")
    (tmp_path / "other" / "1" / "average").rename(item)
    with pytest.raises(UserError, match="are not those that were saved"):
        load_checkpoint(tmp_path)


def test_comparing_and_hashing_cover_it(folder, states, tmp_path):
    with open_for_saving(tmp_path / "checkpoints", keep_last=1) as manager:
        save(manager, states[-1].replace(average=states[-2].average), META, None)
    found = compare_checkpoints(folder / "checkpoints", tmp_path / "checkpoints", 15)
    assert {difference.name.split()[0] for difference in found.different} == {"average"}
    assert saved_items(folder / "checkpoints", 15) == ["params", "optimizer", "average"]
    assert {name.split()[0] for name in state_hashes(states[-1])} == {"params", "optimizer", "average"}
    assert not [name for name in state_hashes(states[-1].replace(average=None)) if name.startswith("average")]
