"""mixtral and qwen3_moe against transformers."""

import pytest
from interop.parity import check_greedy, check_parity

SIZES = dict(
    vocab_size=301,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MIXTRAL = dict(intermediate_size=40)
QWEN = dict(moe_intermediate_size=40, num_experts=6, num_experts_per_tok=3, head_dim=20)


@pytest.mark.parametrize(
    "options",
    [{"num_local_experts": 5}, {"num_experts_per_tok": 3, "sliding_window": 5, "tie_word_embeddings": True}],
    ids=str,
)
def test_mixtral(options, record, tmp_path):
    check_parity("mixtral", SIZES | MIXTRAL | options, record, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_topk_prob": True, "attention_bias": True},
        {"num_experts_per_tok": 6, "use_sliding_window": True, "sliding_window": 5},
    ],
    ids=str,
)
def test_qwen3_moe(options, record, tmp_path):
    check_parity("qwen3_moe", SIZES | QWEN | options, record, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("mixtral", SIZES | MIXTRAL | {"num_local_experts": 5}), ("qwen3_moe", SIZES | QWEN)],
    ids=["mixtral", "qwen3_moe"],
)
def test_greedy_text_is_the_same(model_type, options, record):
    check_greedy(model_type, options, record)
