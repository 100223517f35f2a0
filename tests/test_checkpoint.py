import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax import ModelConfig, UserError, load_checkpoint
from andrea_jax.checkpoint import (
    complete_steps,
    discard_incomplete,
    find_checkpoint,
    fingerprints,
    model_config,
    open_for_saving,
    read_meta,
    restore_state,
    save,
)
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.train.config import RunConfig
from andrea_jax.train.state import abstract_state, init_state

MODEL = ModelConfig(vocab_size=257, context_length=8, d_model=8, n_layer=2, n_head=2)
CONFIG = RunConfig(model=MODEL)
META = {"model": dataclasses.asdict(MODEL), "tokenizer": bytes_tokenizer().to_dict(), "settings": {}}


def state_at(step):
    state = init_state(CONFIG)
    return state.replace(step=jnp.int32(step), params=jax.tree.map(lambda x: x + step, state.params))


def saved(folder, losses, keep_last=2):
    with open_for_saving(folder, keep_last) as manager:
        for step, loss in losses.items():
            save(manager, state_at(step), META, loss)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    saved(folder / "checkpoints", {1: 5.0, 2: 3.0, 3: 4.0, 4: None, 5: 4.5})
    return folder


def test_the_newest_and_the_best_are_kept(run):
    assert complete_steps(run / "checkpoints") == [2, 4, 5]


def test_a_state_comes_back_bit_by_bit(run):
    found = restore_state(run / "checkpoints", 2, abstract_state(CONFIG))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state_at(2)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_parameters_config_and_tokenizer_are_loaded_from_the_newest_or_a_named_step(run):
    params, config, tokenizer = load_checkpoint(run)
    assert config == MODEL
    assert tokenizer.to_dict() == bytes_tokenizer().to_dict()
    assert fingerprints(params) == fingerprints(state_at(5).params)
    named, _, _ = load_checkpoint(run, step=4)
    by_path, _, _ = load_checkpoint(run / "checkpoints" / "4")
    assert fingerprints(named) == fingerprints(by_path) == fingerprints(state_at(4).params)


def test_fingerprints_change_with_any_bit_and_not_with_the_order():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    flipped = x.copy()
    flipped.view(np.uint32)[123] ^= 1
    expected = int(x.view(np.uint32).astype(np.uint64).sum() % 2**32)
    assert fingerprints({"x": jnp.asarray(x)}) == {"x": expected}
    assert fingerprints({"x": jnp.asarray(x[::-1].copy())}) == {"x": expected}
    assert fingerprints({"x": jnp.asarray(flipped)}) != {"x": expected}


def test_what_a_kill_left_is_removed_and_named(run, tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "6").mkdir()
    assert complete_steps(tmp_path) == []
    assert discard_incomplete(tmp_path) == ["7.orbax-checkpoint-tmp"]
    assert discard_incomplete(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("where", "step", "message"),
    [("none", None, "no such folder"), ("", 3, "no complete checkpoint of step 3; there are 2, 4, 5")],
)
def test_a_checkpoint_that_is_not_there_is_named(run, where, step, message):
    with pytest.raises(UserError, match=message):
        find_checkpoint(run / where, step)


def test_another_shape_is_refused_with_the_folder(run):
    other = RunConfig(model=dataclasses.replace(MODEL, d_model=16))
    with pytest.raises(UserError, match="checkpoints/2 cannot be restored"):
        restore_state(run / "checkpoints", 2, abstract_state(other))


def test_a_model_with_unknown_settings_is_refused(run):
    meta = read_meta(run / "checkpoints", 2)
    meta["model"]["warp_drive"] = True
    with pytest.raises(UserError, match="warp_drive"):
        model_config(meta)


def test_parameters_sharded_over_eight_devices_are_restored_onto_one(tmp_path):
    script = f"""
import jax, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import *
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(jax.devices(), "x")
state = state_at(3)
spec = lambda x: PartitionSpec("x") if x.ndim and x.shape[0] % 8 == 0 else PartitionSpec()
row = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
state = jax.tree.map(row, state)
assert len(state.params["position_embedding"].sharding.device_set) == 8
with open_for_saving(Path({str(tmp_path)!r}) / "checkpoints", 1) as manager:
    save(manager, state, META, None)
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    params, _, _ = load_checkpoint(tmp_path)
    assert fingerprints(params) == fingerprints(state_at(3).params)
    assert params["position_embedding"].devices() == {jax.devices()[0]}
