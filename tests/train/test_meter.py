import jax.numpy as jnp
import pytest

from andrea_jax import RunError
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.meter import Meter
from andrea_jax.train.report import Quiet


class Recorder(Quiet):
    def __init__(self):
        self.lines, self.records = [], []

    def say(self, text):
        self.lines.append(text)

    def write(self, record):
        self.records.append(record)


def metrics(nll, tokens, finite=True):
    values = dict(loss=nll, nll=nll, tokens=tokens, learning_rate=0.1, grad_norm=2.0, param_norm=3.0)
    return {name: jnp.float32(value) for name, value in values.items()} | {"finite": jnp.bool_(finite)}


def meter(recorder, nonfinite="stop", first=0):
    config = RunConfig(train=TrainConfig(steps=8, log_every=2, nonfinite=nonfinite))
    return Meter(config, recorder, recorder, first, 100, lambda: 40)


def test_a_record_is_the_token_weighted_mean_since_the_last_one():
    recorder = Recorder()
    m = meter(recorder)
    for step, (nll, tokens) in enumerate([(1.0, 30), (2.0, 10), (3.0, 10), (5.0, 30)], start=1):
        m.read(step, metrics(nll, tokens))
    m.catch_up()
    assert [(r["step"], r["loss"], r["tokens"]) for r in recorder.records] == [(2, 1.25, 140), (4, 4.5, 180)]


def test_metrics_are_read_one_step_late():
    recorder = Recorder()
    m = meter(recorder)
    m.read(1, metrics(1.0, 1))
    m.read(2, metrics(1.0, 1))
    assert recorder.records == []
    m.read(3, metrics(1.0, 1))
    assert [r["step"] for r in recorder.records] == [2]


def test_the_initial_loss_is_set_beside_that_of_uniform_guessing_once():
    recorder = Recorder()
    m = meter(recorder)
    m.read(1, metrics(7.5, 1))
    m.read(2, metrics(7.4, 1))
    m.catch_up()
    vocabulary = RunConfig().model.vocab_size
    assert len(recorder.lines) == 1
    assert f"initial loss 7.500; uniform guessing would give ln({vocabulary})" in recorder.lines[0]
    resumed = Recorder()
    m = meter(resumed, first=4)
    m.read(5, metrics(3.0, 1))
    m.catch_up()
    assert resumed.lines == []


def test_a_step_that_is_not_finite_stops_with_the_last_checkpoint_and_advice():
    m = meter(Recorder())
    m.read(1, metrics(float("nan"), 1, finite=False))
    with pytest.raises(RunError, match=r"step 1: loss nan.*checkpoint is of step 40.*schedule\.peak"):
        m.catch_up()


def test_a_step_that_is_skipped_is_told_counted_and_left_out_of_the_mean():
    recorder = Recorder()
    m = meter(recorder, nonfinite="skip")
    m.read(1, metrics(2.0, 10))
    m.read(2, metrics(float("inf"), 10, finite=False))
    m.catch_up()
    assert any("step 2" in line and "skipped" in line for line in recorder.lines)
    assert [(r["loss"], r["skipped"]) for r in recorder.records] == [(2.0, 1)]
