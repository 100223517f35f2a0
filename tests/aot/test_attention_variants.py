"""Attention of the variants, forward and backward, compiled for named GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from aot.gpu import compile_for

from andrea_jax import EngineConfig, andrea_modern_120m
from andrea_jax.layers.attention import causal_attend

pytestmark = pytest.mark.aot
B, T = 8, 1024
MODEL = andrea_modern_120m()


def compiled(card, engine, segments=False, T=T, **changes):
    """Output and gradients of q, k and v, bfloat16."""
    model = dataclasses.replace(MODEL, **changes)
    q, k = (jax.ShapeDtypeStruct((B, T, n, model.head_dim), jnp.bfloat16) for n in (model.n_head, model.kv_heads))
    segments_BT = jax.ShapeDtypeStruct((B, T), jnp.int32) if segments else None

    def f(q, k, v, dy, segments_BT):
        y, vjp = jax.vjp(causal_attend(model, engine, segments_BT), q, k, v)
        return y, vjp(dy)

    return compile_for(card, f, q, k, k, q, segments_BT)


@pytest.mark.parametrize("card", ["h200", "rtx3060"])
@pytest.mark.parametrize(
    ("changes", "segments"),
    [
        (dict(n_kv_head=4), False),
        (dict(window=256), False),
        (dict(window=256, n_kv_head=1), True),
        (dict(position="alibi", n_kv_head=3), True),
        (dict(position="alibi", window=256), False),
    ],
)
def test_cudnn_takes_windows_slopes_grouped_heads_and_segments(card, changes, segments):
    text = compiled(card, EngineConfig(attention="cudnn"), segments, **changes).as_text()
    assert text.count("__cudnn$fmha") >= 2
    assert "Backward" in text
    assert f"{B},{MODEL.n_head},{T},{T}" not in text or segments  # a mask is one array for all heads, and broadcast
    window = changes.get("window", 0)
    assert f'"sliding_window_length":{window}' in text.replace(" ", "")


def test_a_soft_cap_needs_memory_that_grows_with_the_length_and_no_loop_over_heads(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    short, long = (compiled("h200", EngineConfig(), T=T, attention_soft_cap=50.0) for T in (512, 1024))
    assert "cudnn" not in long.as_text()
    assert "while(" not in long.as_text()
    memory = [step.memory_analysis().temp_size_in_bytes for step in (short, long)]
    assert memory[1] < 2.5 * memory[0]  # all scores would need four times as much
