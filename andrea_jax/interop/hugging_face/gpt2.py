"""gpt2: learned positions, LayerNorm, biases everywhere; its matrices lie as ours do."""

from __future__ import annotations

from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture, Row
from andrea_jax.interop.hugging_face.layouts import FROM_HEADS, FUSED, SAME, TRANSPOSED
from andrea_jax.interop.hugging_face.options import ACTIVATIONS, Field, Options


def read_more(options: Options) -> dict[str, Any]:
    scaled = options.get("scale_attn_weights", True)
    inner = options.get("n_inner", None)
    return {"attention_scale": None if scaled else 1.0, "mlp_size": inner or 4 * int(options.number("n_embd"))}


def write_more(config: ModelConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    scaled = config.attention_scale != 1.0 or config.head_dim == 1
    return {"n_inner": config.mlp_dim, "scale_attn_weights": scaled, **dropout}


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    prefix="transformer.",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "context_length"),
        Field("n_embd", "d_model"),
        Field("n_layer", "n_layer"),
        Field("n_head", "n_head"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("activation_function", "activation", "gelu_new", {"gelu_new": "gelu", **ACTIVATIONS}),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    shared={"attention_bias": True},
    only={"add_cross_attention": (False,), "scale_attn_by_inverse_layer_idx": (False,)},
    read_more=read_more,
    write_more=write_more,
    filled=("norm_gain", "norm_shift", "mlp_bias", "attention_bias"),
    rows=(
        Row("token_embedding", ("transformer.wte.weight",), SAME),
        Row("position_embedding", ("transformer.wpe.weight",), SAME),
        Row("blocks.attention_norm.gain", ("transformer.h.{}.ln_1.weight",), SAME),
        Row("blocks.attention_norm.shift", ("transformer.h.{}.ln_1.bias",), SAME),
        Row("blocks.attention.qkv", ("transformer.h.{}.attn.c_attn.weight",), FUSED),
        Row("blocks.attention.b_qkv", ("transformer.h.{}.attn.c_attn.bias",), FUSED),
        Row("blocks.attention.out", ("transformer.h.{}.attn.c_proj.weight",), FROM_HEADS),
        Row("blocks.attention.b_out", ("transformer.h.{}.attn.c_proj.bias",), SAME),
        Row("blocks.mlp_norm.gain", ("transformer.h.{}.ln_2.weight",), SAME),
        Row("blocks.mlp_norm.shift", ("transformer.h.{}.ln_2.bias",), SAME),
        Row("blocks.mlp.w_1", ("transformer.h.{}.mlp.c_fc.weight",), SAME),
        Row("blocks.mlp.b_1", ("transformer.h.{}.mlp.c_fc.bias",), SAME),
        Row("blocks.mlp.w_2", ("transformer.h.{}.mlp.c_proj.weight",), SAME),
        Row("blocks.mlp.b_2", ("transformer.h.{}.mlp.c_proj.bias",), SAME),
        Row("final_norm.gain", ("transformer.ln_f.weight",), SAME),
        Row("final_norm.shift", ("transformer.ln_f.bias",), SAME),
        Row("head", ("lm_head.weight",), TRANSPOSED),
    ),
)
