"""gemma2 and gemma3_text against transformers."""

import pytest
from interop.parity import check_greedy, check_parity

SIZES = dict(
    vocab_size=301,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=64,
    sliding_window=6,
    query_pre_attn_scalar=30,
    pad_token_id=None,
)
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
EVERY_SECOND = 2 * ["sliding_attention", "full_attention"]
SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}


@pytest.mark.parametrize(
    "options", [CAPS, {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1}], ids=str
)
def test_gemma2(options, record, tmp_path):
    check_parity("gemma2", SIZES | options, record, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_layers": 7},
        {"rope_parameters": SCALED, "layer_types": EVERY_SECOND, "final_logit_softcapping": 3.0},
        {"layer_types": 4 * ["full_attention"], "head_dim": 12},
    ],
    ids=str,
)
def test_gemma3(options, record, tmp_path):
    check_parity("gemma3_text", SIZES | options, record, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("gemma2", SIZES), ("gemma3_text", SIZES | {"num_hidden_layers": 7})],
    ids=["gemma2", "gemma3"],
)
def test_greedy_text_is_the_same(model_type, options, record):
    check_greedy(model_type, options, record)
