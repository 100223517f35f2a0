"""Each variant's gin file trains, from the corpus to a sample and a checkpoint, and learns in thirty steps."""

import math

import jax
import numpy as np
import pytest
from gin_settings import CONFIGS, run_config

from andrea_jax.checkpoint import load_checkpoint
from andrea_jax.train.corpus import open_corpus
from andrea_jax.train.loop import train
from andrea_jax.train.run_folder import read_metrics

NAMES = sorted(path.stem for path in CONFIGS.glob("variant_*.gin"))
SHORT = {"train.steps": "30", "train.log_every": "1", "train.eval_windows": "8", "train.sample_tokens": "4"}
SHORT |= {"train.tensorboard": "False", "schedule.warmup": "3"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


def test_each_family_has_a_file():
    families = "alibi gemma2 gemma3 llama parallel post_norm rezero speedrun"
    assert {f"variant_{name}" for name in families.split()} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(name, prepared, tmp_path):
    config, bound = run_config([name], (), SHORT | {"data.prepared": str(prepared), "train.run_dir": str(tmp_path)})
    config, corpus = open_corpus(config, bound)
    result = train(config, corpus)
    losses = [record["loss"] for record in read_metrics(tmp_path) if record["kind"] == "train"]
    assert len(losses) == 30
    chance = math.log(config.model.vocab_size)
    assert abs(losses[0] - chance) < 0.35  # an untied head starts 0.2 above
    assert max(losses[-5:]) < chance - 0.6
    assert result.validation["loss"] < chance - 0.6
    params, model, _ = load_checkpoint(tmp_path)
    assert model == config.model
    jax.tree.map(np.testing.assert_array_equal, params, result.state.params)
