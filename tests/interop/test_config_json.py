"""config.json: what it means, what is refused, and the way back."""

import dataclasses
import json

import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architectures import ARCHITECTURES, architecture_of
from andrea_jax.interop.hugging_face.canonical import canonical
from andrea_jax.interop.hugging_face.options import Options
from andrea_jax.interop.hugging_face.reading import read_config
from andrea_jax.parameters import count_parameters
from andrea_jax.presets import PRESETS
from andrea_jax.settings import UserError

LLAMA = dict(
    model_type="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
MISTRAL = dict(
    model_type="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
)
QWEN3 = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=40960,
    rope_theta=1000000,
    tie_word_embeddings=True,
)
GEMMA2 = dict(
    model_type="gemma2",
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=8192,
)
GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=262144,
    hidden_size=1152,
    intermediate_size=6912,
    num_hidden_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=32768,
    sliding_window=512,
    query_pre_attn_scalar=256,
)
GPT2 = dict(model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
MIXTRAL = MISTRAL | dict(model_type="mixtral", rms_norm_eps=1e-5)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40960,
    norm_topk_prob=True,
)
EVERY = (GPT2, LLAMA, MISTRAL, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE)
LLAMA3 = {"factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def read(options, **changes):
    return read_config(Options(options | changes))[1]


@pytest.mark.parametrize(
    ("options", "published"),
    [
        (GPT2, 124_439_808),
        (LLAMA, 1_235_814_400),  # Llama 3.2 1B
        (MISTRAL, 7_241_732_096),  # Mistral 7B
        (QWEN3, 596_049_920),  # Qwen3 0.6B
        (GEMMA2, 2_614_341_888),  # Gemma 2 2B
        (GEMMA3, 999_885_952),  # Gemma 3 1B
        (MIXTRAL, 46_702_792_704),  # Mixtral 8x7B
        (QWEN3_MOE, 30_532_122_624),  # Qwen3 30B A3B
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_parameters_of_published_models_are_counted_exactly(options, published):
    assert count_parameters(read(options)) == published


def test_what_is_left_out_has_the_value_of_the_architecture():
    assert read(MISTRAL).window == 4096
    assert read(MISTRAL).rotary_base == 10000
    assert read(MISTRAL, sliding_window=None).window is None
    assert read(QWEN3).head_dim == 128
    assert read(GPT2).mlp_dim == 4 * 768
    gemma2, gemma3 = read(GEMMA2), read(GEMMA3)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.global_every, gemma2.window) == (50, 30, 2, 4096)
    assert (gemma3.global_every, gemma3.rotary_base, gemma3.rotary_local_base) == (6, 1e6, 1e4)
    mixtral, qwen3_moe = read(MIXTRAL), read(QWEN3_MOE)
    assert (mixtral.n_expert, mixtral.expert_top_k, mixtral.router_renormalize, mixtral.window) == (8, 2, True, None)
    assert (mixtral.rotary_base, qwen3_moe.expert_top_k, qwen3_moe.window) == (1e6, 8, None)
    assert not read({key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}).router_renormalize
    assert gemma2.attention_scale == 1 / 16
    assert gemma2.embedding_scale == 48


def test_both_forms_of_rotary_options_mean_the_same():
    old = read(LLAMA, rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    new = read(LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    assert old == new
    assert (old.rotary_scaling, old.rotary_factor, old.rotary_original) == ("llama3", 32, 8192)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=10000)
    assert old == read(GEMMA3, rope_parameters=nested)
    assert (old.rotary_scaling, old.rotary_factor) == ("linear", 8)


def test_yarn_without_a_factor_takes_it_from_the_contexts():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    config = read(LLAMA, rope_scaling=yarn)
    assert (config.rotary_factor, config.rotary_slow, config.rotary_fast) == (4, 1, 32)


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options["model_type"])
def test_options_read_back_as_the_same_model(options):
    config = read(options)
    architecture = ARCHITECTURES[options["model_type"]]
    written = json.loads(json.dumps(architecture.write_config(canonical(config))))
    back = Options(written | {"model_type": architecture.model_type})
    assert canonical(read_config(back)[1]) == canonical(config)
    assert back.unused() == []
    assert architecture_of(config) is architecture


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (LLAMA, {"model_type": "bert"}, "model_type = 'bert': there are gpt2, llama"),
        (LLAMA, {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu': there are silu"),
        (LLAMA, {"hidden_size": None}, "d_model = None: expected a whole number"),
        (LLAMA, {"num_key_value_heads": 5}, "n_kv_head = 5 does not divide n_head = 32"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type = 'dynamic': there are default"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2': a number above 0"),
        (LLAMA, {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": None}}, "low_freq_factor = None"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": False}}, "truncate = False"),
        (LLAMA, {"rope_scaling": 2}, "rope_scaling = 2: an object"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        (LLAMA, {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": "4k"}, "embeddings = '4k'"),
        (MISTRAL, {"layer_types": ["full_attention"] * 32}, "layer_types = "),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 3}, "blocks 0, 1, 2 see all"),
        (QWEN3, {"max_window_layers": "3"}, "max_window_layers = '3'"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types = .*: 28 of sliding_attention and full_attention"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope_type = 'linear'"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: there is only 1"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True"),
    ],
)
def test_an_option_that_our_models_lack_is_named(options, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read(options, **changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_size_that_is_left_out_is_named(name):
    with pytest.raises(UserError, match=f"config.json: {name} is missing"):
        read({key: value for key, value in LLAMA.items() if key != name})


def test_options_that_nothing_reads_are_listed():
    options = Options(LLAMA | {"unheard_of": 1, "rope_scaling": {"type": "linear", "factor": 2, "finetuned": True}})
    read_config(options)
    assert options.unused() == ["unheard_of", "rope_scaling.finetuned"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_model_of_theirs(preset):
    expected = "qwen3" if "modern" in preset else "gpt2"
    assert architecture_of(PRESETS[preset]()).model_type == expected


ROTARY = dict(position="rotary", norm="rms", norm_shift=False, gated=True, activation="silu", mlp_bias=False)
SMALL = ModelConfig(vocab_size=300, context_length=64, d_model=48, n_layer=4, n_head=4)


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({"tie_embeddings": False, "activation": "relu2", "dropout": 0.1, "vocab_multiple": 128}, "gpt2"),
        ({"mlp_ratio": 2.7, "mlp_multiple": 8, "attention_scale": 1.0, "norm_gain": False}, "gpt2"),
        ({**ROTARY, "n_kv_head": 2, "norm_gain": False}, "llama"),
        ({**ROTARY, "mlp_bias": True, "attention_bias": True}, "llama"),
        ({**ROTARY, "window": 9}, "mistral"),
        ({**ROTARY, "window": 9, "global_every": 1}, "llama"),
        ({**ROTARY, "n_head": 5, "head_size": 8}, "mistral"),
        ({**ROTARY, "qk_norm": True, "window": 9, "global_every": 3}, "qwen3"),
        ({**ROTARY, "norm_position": "sandwich", "embedding_scale": 48**0.5}, "gemma2"),
        ({**ROTARY, "n_expert": 4, "balance_weight": 0.01, "norm_gain": False}, "mixtral"),
        ({**ROTARY, "n_expert": 4, "qk_norm": True, "router_renormalize": False, "expert_size": 20}, "qwen3_moe"),
        ({**ROTARY, "norm_position": "sandwich", "embedding_scale": 48**0.5, "qk_norm": True}, "gemma3_text"),
    ],
)
def test_a_model_is_written_as_the_first_architecture_that_expresses_it(changes, model_type):
    assert architecture_of(dataclasses.replace(SMALL, **changes)).model_type == model_type


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": "alibi"}, "gpt2 .*position: alibi != learned"),
        ({"position": "none"}, "position: none != learned"),
        ({"norm": "rms"}, "norm: rms != layer"),
        ({"norm_position": "post"}, "norm_position: post != pre"),
        ({"final_norm": False}, "final_norm: False != True"),
        ({"parallel_block": True}, "parallel_block: True != False"),
        ({"embedding_scale": 2.0}, "embedding_scale: 2.0 != 1.0"),
        ({"logit_scale": 0.5}, "logit_scale: 0.5 != 1.0"),
        ({"branch_multiplier": 0.5}, "branch_multiplier"),
        ({"branch_gain": 0.0}, "branch_gain"),
        ({"attention_scale": 0.3}, "attention_scale: 0.3 != "),
        ({"n_kv_head": 2}, "n_kv_head: 2 != 4"),
        ({"gated": True}, "gated: True != False"),
        ({"qk_norm": True}, "qk_norm"),
        ({"window": 9}, "window"),
        ({"n_expert": 4}, "n_expert"),
        ({**ROTARY, "n_expert": 4, "router_renormalize": False}, "mixtral .*router_renormalize: False != True"),
        ({**ROTARY, "n_expert": 4, "router": "sigmoid"}, "mixtral .*router: sigmoid != softmax"),
        ({**ROTARY, "n_expert": 4, "n_shared_expert": 1}, "mixtral .*n_shared_expert: 1 != 0"),
        ({**ROTARY, "n_expert": 4, "capacity_factor": 1.0}, "mixtral .*capacity_factor: 1.0 != None"),
        ({**ROTARY, "n_expert": 4, "balance_bias": 0.001}, "mixtral .*balance_bias: 0.001 != None"),
        ({**ROTARY, "attention_scale": 0.3}, "llama .*attention_scale"),
        (
            {**ROTARY, "norm_position": "sandwich", "embedding_scale": 48**0.5, "attention_scale": 0.3},
            "attention_scale",
        ),
    ],
)
def test_a_model_that_no_architecture_expresses_is_refused_with_the_reason(changes, reason):
    with pytest.raises(UserError, match=reason):
        architecture_of(dataclasses.replace(SMALL, **changes))
