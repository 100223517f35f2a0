import math

import jax
import numpy as np
import pytest

from andrea_jax import ModelConfig, evaluate, init_params
from andrea_jax.data.shards import tokens_in_memory
from andrea_jax.data.windows import eval_batches
from andrea_jax.model import model_forward

CONFIG = ModelConfig(vocab_size=7, context_length=5, d_model=8, n_layer=1, n_head=2)
IDS = np.random.default_rng(0).integers(0, 7, 43)
BYTES = np.array([0, 1, 1, 2, 3, 1, 4], np.int32)


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), CONFIG)


def by_hand(params):
    """Nats of every token after the first, window by window, in float64 from the logits."""
    nats = []
    for start in range(0, len(IDS) - 1, 5):
        window = IDS[start : start + 6]
        logits = np.asarray(model_forward(params, window[None, :-1], CONFIG)[0], np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats += [-log_p[t, target] for t, target in enumerate(window[1:])]
    return np.array(nats)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_every_token_counts_once_whatever_the_batch(params, batch_size):
    found = evaluate(params, eval_batches(tokens_in_memory(IDS), batch_size, 5), CONFIG, BYTES)
    nats = by_hand(params)
    assert found["tokens"] == 42
    assert found["loss"] == pytest.approx(nats.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
    assert found["bytes"] == BYTES[IDS[1:]].sum()
    assert found["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / BYTES[IDS[1:]].sum(), rel=1e-5)


def test_a_stated_part_of_the_split_is_its_first_windows(params):
    found = evaluate(params, eval_batches(tokens_in_memory(IDS), 2, 5, max_windows=3), CONFIG, BYTES)
    assert found["tokens"] == 15
    assert found["loss"] == pytest.approx(by_hand(params)[:15].mean(), rel=1e-5)


def test_evaluation_has_no_dropout(params):
    import dataclasses

    wet = dataclasses.replace(CONFIG, dropout=0.5)
    batches = list(eval_batches(tokens_in_memory(IDS), 4, 5))
    assert evaluate(params, batches, wet, BYTES) == evaluate(params, batches, CONFIG, BYTES)
