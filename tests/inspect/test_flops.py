import dataclasses
from types import SimpleNamespace

import jax
import pytest

from andrea_jax import ModelConfig, andrea_120m
from andrea_jax.inspect.flops import flops_per_token, model_flops_utilization


def test_flops_per_token_by_hand():
    """12 blocks of 12 d^2 = 84,934,656 and the output product 6,488,832, times 6; attention 6 L T d = 56,623,104."""
    assert flops_per_token(andrea_120m()) == 6 * (84_934_656 + 6_488_832) + 56_623_104


def test_utilization_is_a_share_of_a_known_devices_peak_and_nothing_elsewhere(monkeypatch):
    assert model_flops_utilization(andrea_120m(), 1000.0) is None
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    tokens_per_second = 2 * 989e12 / flops_per_token(andrea_120m())
    assert model_flops_utilization(andrea_120m(), tokens_per_second) == pytest.approx(1.0)


SMALL = ModelConfig(vocab_size=100, context_length=64, d_model=32, n_layer=3, n_head=4)


@pytest.mark.parametrize(
    ("changes", "matrices", "keys"),
    [
        ({}, 4 * 32 * 32 + 8 * 32 * 32, [32, 32, 32]),
        (dict(n_kv_head=2), 32 * 32 + 2 * 32 * 16 + 32 * 32 + 8 * 32 * 32, [32, 32, 32]),
        (dict(gated=True, mlp_size=80), 4 * 32 * 32 + 3 * 32 * 80, [32, 32, 32]),
        # of 64 positions the first 16 see 8 on the mean, the other 48 see 16: 14 together
        (dict(window=16), 12 * 32 * 32, [14, 14, 14]),
        (dict(window=16, global_every=2), 12 * 32 * 32, [14, 32, 14]),
        (dict(window=64), 12 * 32 * 32, [32, 32, 32]),
        (dict(window=1000), 12 * 32 * 32, [32, 32, 32]),
        (dict(head_size=16), 8 * 32 * 32 + 8 * 32 * 32, [64, 64, 64]),  # twice as wide: twice the products
        (dict(tie_embeddings=False, vocab_multiple=64), 12 * 32 * 32, [32, 32, 32]),
    ],
)
def test_flops_of_variants_by_hand(changes, matrices, keys):
    """6 per matrix element and token; scores and sums are 2 products of 2 N H per key, three times with backward."""
    found = flops_per_token(dataclasses.replace(SMALL, **changes))
    assert found == 6 * (3 * matrices + 32 * 100) + 12 * 32 * sum(keys)
