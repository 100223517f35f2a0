import json
import sys
from types import SimpleNamespace

import pytest

from andrea_jax import UserError
from andrea_jax.train.config import TrainConfig
from andrea_jax.train.run_folder import MetricsLog, locked, read_metrics

OFF = TrainConfig(tensorboard=False)


def record(step, loss=1.0):
    return {"kind": "train", "step": step, "loss": loss, "mfu": None}


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path):
    lines = "".join(json.dumps(record(step)) + "\n" for step in (10, 20, 30))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"kind": "train", "st')
    log = MetricsLog(tmp_path, OFF, {}, start_step=20)
    log.write(record(30, 2.0))
    log.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_tensorboard_gets_each_number(tmp_path):
    log = MetricsLog(tmp_path, TrainConfig(), {}, start_step=0)
    log.write(record(1, 0.5))
    log.close()
    content = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"train/loss" in content
    assert b"train/mfu" not in content


def test_weights_and_biases_continues_the_same_run(tmp_path, monkeypatch):
    calls = []
    fake = SimpleNamespace(
        init=lambda **options: (
            calls.append(options)
            or SimpleNamespace(
                log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("end")
            )
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for start in (0, 1):
        log = MetricsLog(tmp_path, TrainConfig(tensorboard=False, wandb="project"), {"train": {}}, start)
        log.write(record(start + 1))
        log.close()
    first, second = calls[0], calls[3]
    assert first["project"] == "project"
    assert first["id"] == second["id"]
    assert calls[1] == ({"train/loss": 1.0}, 1)
    assert calls[2] == "end"


def test_without_wandb_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install"):
        MetricsLog(tmp_path, TrainConfig(tensorboard=False, wandb="project"), {}, 0)


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"train\.run_dir = .*file/run.* cannot be used"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
