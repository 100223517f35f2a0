"""gpt2 against transformers, and models of our own as gpt2."""

import pytest
from interop.parity import check_greedy, check_parity

SIZES = dict(vocab_size=301, n_positions=48, n_embd=48, n_layer=3, n_head=4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 50, "activation_function": "relu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        {"scale_attn_weights": False, "activation_function": "gelu", "n_head": 3},
    ],
    ids=str,
)
def test_gpt2(options, record, tmp_path):
    check_parity("gpt2", SIZES | options, record, tmp_path)


def test_greedy_text_is_the_same(record):
    check_greedy("gpt2", SIZES | {"tie_word_embeddings": False}, record)
