import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax import ModelConfig
from andrea_jax.checkpoint import open_for_saving, save
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.inspect.moved_run import Move, changed_by_restoring, drift, rounding
from andrea_jax.inspect.state_hash import params_hash, restored_hashes, state_hashes, tensor_hash
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import init_state

MODEL = ModelConfig(vocab_size=257, context_length=8, d_model=8, n_layer=1, n_head=2)
CONFIG = RunConfig(model=MODEL, train=TrainConfig(batch_size=8))
GOOD = Move(6, "8", "1", 40, [], (5.0, 5.0 + 1e-6), tolerance=1e-6)


def test_a_move_is_good_only_with_equal_bits_and_a_loss_within_rounding():
    assert GOOD.good
    assert not dataclasses.replace(GOOD, changed=["params head"]).good
    assert not dataclasses.replace(GOOD, losses=(5.0, 5.00001)).good
    assert not dataclasses.replace(GOOD, losses=(5.0, math.nan)).good
    assert "1 of 40 tensors restored to other bits, the first params head" in str(
        dataclasses.replace(GOOD, changed=["params head"])
    )


def test_rounding_is_far_below_what_another_batch_would_do():
    """64 terms of a loss near 5: another batch or dropout moves the mean by a percent or so."""
    assert 8 * 2.0**-23 < rounding(CONFIG, "float32") < 1e-4
    assert rounding(CONFIG, "bfloat16") > 100 * rounding(CONFIG, "float32")


def test_drift_is_the_loss_that_is_relatively_far(tmp_path):
    for name, losses in {"a": (5.0, 4.0, 3.0), "b": (5.0, 4.00001, 3.0)}.items():
        (tmp_path / name).mkdir()
        lines = [{"kind": "train", "step": i + 1, "loss": x} for i, x in enumerate(losses)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = drift(tmp_path / "a", tmp_path / "b", "float32")
    assert found.relative == pytest.approx(2.5e-6)
    assert found.furthest.step == 2
    assert found.good
    assert not dataclasses.replace(found, relative=1e-2).good
    assert drift(tmp_path / "a", tmp_path / "a", "float32").relative == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    settings = {f.name: dataclasses.asdict(getattr(CONFIG, f.name)) for f in dataclasses.fields(CONFIG)}
    meta = {"model": dataclasses.asdict(MODEL), "tokenizer": bytes_tokenizer().to_dict(), "settings": settings}
    with open_for_saving(folder, 1) as manager:
        save(manager, init_state(CONFIG).replace(step=jnp.int32(5)), meta, None)
    return folder


def test_another_process_restores_over_two_devices_what_this_one_reads(checkpoints):
    import os

    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    changed, tensors = changed_by_restoring(environment, checkpoints, 5, {"mesh": {"fsdp": 2}})
    assert changed == []
    assert tensors == len(jax.tree.leaves((init_state(CONFIG).params, init_state(CONFIG).optimizer)))


def test_a_tensor_with_other_bits_is_named(checkpoints, monkeypatch):
    found = restored_hashes(checkpoints, 5, {})
    assert found == state_hashes(init_state(CONFIG))
    name = "params final_norm.gain"
    answer = json.dumps(found | {name: "0"})
    monkeypatch.setattr(
        "andrea_jax.inspect.moved_run.subprocess.run",
        lambda *_, **__: type("Done", (), {"returncode": 0, "stdout": answer}),
    )
    assert changed_by_restoring({}, checkpoints, 5, {})[0] == [name]


def test_hashes_are_of_shape_dtype_and_bits():
    x = np.arange(6, dtype=np.float32)
    others = [x.reshape(2, 3), x.view(np.int32), np.nextafter(x, np.float32(9)), -x]
    assert tensor_hash(x) == tensor_hash(x.copy())
    assert len({tensor_hash(x), *map(tensor_hash, others)}) == 5
    assert params_hash({"a": x, "b": -x}) == params_hash({"b": -x, "a": x}) != params_hash({"a": -x, "b": x})
    assert tensor_hash(np.asarray(jnp.ones(3, jnp.bfloat16))) != tensor_hash(np.ones(3, np.float32))
