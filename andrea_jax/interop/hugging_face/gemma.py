"""gemma2 and gemma3_text: norms before and after each branch that multiply by 1 + weight, windows in most blocks."""

from __future__ import annotations

import math
from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture, Row
from andrea_jax.interop.hugging_face.layouts import CENTRED, SAME
from andrea_jax.interop.hugging_face.llama import ATTENTION, ENDS, FIELDS, MLP, SHARED
from andrea_jax.interop.hugging_face.options import ACTIVATIONS, Field, Options
from andrea_jax.interop.hugging_face.rotary import read_rotary, write_rotary
from andrea_jax.interop.hugging_face.windows import every_nth_global, layer_types, read_windows

NORMS = (
    Row("blocks.attention_norm.gain", ("model.layers.{}.input_layernorm.weight",), SAME),
    Row("blocks.attention_out_norm.gain", ("model.layers.{}.post_attention_layernorm.weight",), SAME),
    Row("blocks.mlp_norm.gain", ("model.layers.{}.pre_feedforward_layernorm.weight",), SAME),
    Row("blocks.mlp_out_norm.gain", ("model.layers.{}.post_feedforward_layernorm.weight",), SAME),
)
ROWS = tuple(
    row._replace(layout=CENTRED) if row.ours.endswith(".gain") else row for row in (*ENDS, *NORMS, *ATTENTION, *MLP)
)
OWN = {
    "activation": Field(
        "hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu", **ACTIVATIONS}
    ),
    "head_size": Field("head_dim", "head_size", 256),
    "tie_embeddings": Field("tie_word_embeddings", "tie_embeddings", True),
    "attention_bias": Field("attention_bias", "attention_bias", False),
}
ALL_FIELDS = tuple(({field.ours: field for field in FIELDS} | OWN).values())


def _read(options: Options, every: int) -> dict[str, Any]:
    types = every_nth_global(int(options.number("num_hidden_layers")), every)
    scales = {
        "attention_scale": options.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": math.sqrt(options.number("hidden_size")),
    }
    return scales | read_windows(options, options.get("sliding_window", 4096), types)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round((config.attention_scale or 1) ** -2),
        "sliding_window": config.window or config.context_length,
        "layer_types": layer_types(config),
    }


def read_gemma2(options: Options) -> dict[str, Any]:
    return _read(options, 2) | read_rotary(options, 10000.0)


def read_gemma3(options: Options) -> dict[str, Any]:
    fields = _read(options, int(options.number("sliding_window_pattern", 6)))
    fields |= read_rotary(options, 1000000.0, 10000.0)
    return fields if "window" in fields else fields | {"rotary_local_base": None}


GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    prefix="model.",
    fields=(
        *ALL_FIELDS,
        Field("attn_logit_softcapping", "attention_soft_cap", 50.0),
        Field("final_logit_softcapping", "logit_soft_cap", 30.0),
    ),
    shared=SHARED | {"norm_position": "sandwich"},
    rows=ROWS,
    only={"use_bidirectional_attention": (False,)},
    read_more=read_gemma2,
    write_more=lambda config: _write(config) | write_rotary(config),
    whole_heads=True,
)

GEMMA3 = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    prefix="model.",
    fields=(*ALL_FIELDS, Field("final_logit_softcapping", "logit_soft_cap", None)),
    shared=SHARED | {"norm_position": "sandwich", "qk_norm": True},
    rows=ROWS,
    only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
    read_more=read_gemma3,
    write_more=lambda config: _write(config) | write_rotary(config, local=True),
    whole_heads=True,
)
