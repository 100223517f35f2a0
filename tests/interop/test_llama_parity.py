"""llama, mistral and qwen3 against transformers."""

import pytest
from interop.parity import check_greedy, check_parity

SIZES = dict(
    vocab_size=301,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 30.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"head_dim": 32, "max_position_embeddings": 256}  # so that its ramp lies within the frequencies


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 20, "num_key_value_heads": 1, "rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": YARN, **LONG},
        {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5}, **LONG},
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8}, **LONG},
    ],
    ids=str,
)
def test_llama(options, record, tmp_path):
    check_parity("llama", SIZES | options, record, tmp_path)


@pytest.mark.parametrize("options", [{"sliding_window": 5}, {"sliding_window": None, "head_dim": 20}], ids=str)
def test_mistral(options, record, tmp_path):
    check_parity("mistral", SIZES | options, record, tmp_path)


WINDOWS = {"use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 16, "tie_word_embeddings": True},
        {"head_dim": 24, "attention_bias": True, "max_window_layers": 0, **WINDOWS},
        {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **WINDOWS},
    ],
    ids=str,
)
def test_qwen3(options, record, tmp_path):
    check_parity("qwen3", SIZES | options, record, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", SIZES | LONG | {"rope_parameters": YARN}),
        ("mistral", SIZES | {"sliding_window": 5}),
        ("qwen3", SIZES | {"head_dim": 16}),
    ],
    ids=["llama", "mistral", "qwen3"],
)
def test_greedy_text_is_the_same(model_type, options, record):
    check_greedy(model_type, options, record)
