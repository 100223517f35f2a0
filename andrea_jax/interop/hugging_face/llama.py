"""llama, mistral and qwen3: rotary positions, RMS norm, a gated MLP, grouped heads."""

from __future__ import annotations

from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture, Row
from andrea_jax.interop.hugging_face.layouts import HEADS, HEADS_TRANSPOSED, SAME, TRANSPOSED
from andrea_jax.interop.hugging_face.options import ACTIVATIONS, Field, Options
from andrea_jax.interop.hugging_face.rotary import GLOBAL, WINDOWED, read_rotary, write_rotary
from andrea_jax.interop.hugging_face.windows import layer_types, read_windows

SHARED: dict[str, Any] = {"position": "rotary", "norm": "rms", "norm_shift": False, "gated": True, "mlp_bias": False}
FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "context_length"),
    Field("hidden_size", "d_model"),
    Field("num_hidden_layers", "n_layer"),
    Field("num_attention_heads", "n_head"),
    Field("num_key_value_heads", "n_kv_head", None),
    Field("head_dim", "head_size", None),
    Field("intermediate_size", "mlp_size"),
    Field("hidden_act", "activation", "silu", {"silu": "silu", **ACTIVATIONS}),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("tie_word_embeddings", "tie_embeddings", False),
)
ENDS = (
    Row("token_embedding", ("model.embed_tokens.weight",), SAME),
    Row("final_norm.gain", ("model.norm.weight",), SAME),
    Row("head", ("lm_head.weight",), TRANSPOSED),
)
ATTENTION = (
    Row(
        "blocks.attention.qkv",
        tuple(f"model.layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"),
        HEADS_TRANSPOSED,
    ),
    Row("blocks.attention.b_qkv", tuple(f"model.layers.{{}}.self_attn.{part}_proj.bias" for part in "qkv"), HEADS),
    Row("blocks.attention.out", ("model.layers.{}.self_attn.o_proj.weight",), TRANSPOSED),
    Row("blocks.attention.b_out", ("model.layers.{}.self_attn.o_proj.bias",), SAME),
    Row("blocks.attention.q_norm.gain", ("model.layers.{}.self_attn.q_norm.weight",), SAME),
    Row("blocks.attention.k_norm.gain", ("model.layers.{}.self_attn.k_norm.weight",), SAME),
)
NORMS = (
    Row("blocks.attention_norm.gain", ("model.layers.{}.input_layernorm.weight",), SAME),
    Row("blocks.mlp_norm.gain", ("model.layers.{}.post_attention_layernorm.weight",), SAME),
)
MLP = (
    Row("blocks.mlp.w_gate", ("model.layers.{}.mlp.gate_proj.weight",), TRANSPOSED),
    Row("blocks.mlp.w_1", ("model.layers.{}.mlp.up_proj.weight",), TRANSPOSED),
    Row("blocks.mlp.w_2", ("model.layers.{}.mlp.down_proj.weight",), TRANSPOSED),
    Row("blocks.mlp.b_gate", ("model.layers.{}.mlp.gate_proj.bias",), SAME),
    Row("blocks.mlp.b_1", ("model.layers.{}.mlp.up_proj.bias",), SAME),
    Row("blocks.mlp.b_2", ("model.layers.{}.mlp.down_proj.bias",), SAME),
)
ROWS = (*ENDS, *NORMS, *ATTENTION, *MLP)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    prefix="model.",
    fields=(*FIELDS, Field("attention_bias", "attention_bias", False), Field("mlp_bias", "mlp_bias", False)),
    shared=SHARED,
    rows=ROWS,
    read_more=lambda options: read_rotary(options, 10000.0),
    write_more=write_rotary,
    whole_heads=True,
)


def one_window(options: Options, window: int | None, base: float) -> dict[str, Any]:
    """Rotary positions, and the same window in every block, or none."""
    types = [WINDOWED] * int(options.number("num_hidden_layers"))
    options.only("layer_types", types if window else [GLOBAL] * len(types))
    return read_rotary(options, base) | read_windows(options, window, types)


def write_one_window(config: ModelConfig) -> dict[str, Any]:
    return write_rotary(config) | {"sliding_window": config.window}


MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    prefix="model.",
    fields=FIELDS,
    shared=SHARED,
    rows=ROWS,
    read_more=lambda options: one_window(options, options.get("sliding_window", 4096), 10000.0),
    write_more=write_one_window,
)


def used_window(options: Options) -> int | None:
    """Qwen's window, which counts only where it is switched on."""
    return options.get("sliding_window", 4096) if options.get("use_sliding_window", False) else None


def read_qwen3(options: Options) -> dict[str, Any]:
    first = options.number("max_window_layers", 28, above=-1)
    types = [WINDOWED if i >= first else GLOBAL for i in range(int(options.number("num_hidden_layers")))]
    return read_rotary(options, 10000.0) | read_windows(options, used_window(options), types)


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": config.window is not None, "sliding_window": config.window}
    return write_rotary(config) | windows | {"layer_types": layer_types(config)}


QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    prefix="model.",
    fields=(
        *(field for field in FIELDS if field.ours != "head_size"),
        Field("head_dim", "head_size", 128),
        Field("attention_bias", "attention_bias", False),
    ),
    shared=SHARED | {"qk_norm": True},
    rows=ROWS,
    read_more=read_qwen3,
    write_more=write_qwen3,
)
