from types import SimpleNamespace

import jax
import pytest

from andrea_jax import andrea_120m
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
