"""mixtral and qwen3_moe: llama's blocks with experts for the MLP."""

from __future__ import annotations

from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture, Row
from andrea_jax.interop.hugging_face.layouts import TRANSPOSED
from andrea_jax.interop.hugging_face.llama import (
    ATTENTION,
    ENDS,
    FIELDS,
    NORMS,
    SHARED,
    one_window,
    used_window,
    write_one_window,
)
from andrea_jax.interop.hugging_face.options import Field, Options

OTHER_FIELDS = tuple(field for field in FIELDS if field.ours != "mlp_size")


def _rows(place: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    expert = f"model.layers.{{}}.{place}.experts.{{}}"
    return (
        *(*ENDS, *NORMS, *ATTENTION),
        Row("blocks.moe.router", (f"model.layers.{{}}.{place}.gate.weight",), TRANSPOSED),
        Row("blocks.moe.w_gate", (f"{expert}.{gate}.weight",), TRANSPOSED),
        Row("blocks.moe.w_1", (f"{expert}.{up}.weight",), TRANSPOSED),
        Row("blocks.moe.w_2", (f"{expert}.{down}.weight",), TRANSPOSED),
    )


MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    prefix="model.",
    fields=(
        *(field._replace(default=1e-5) if field.ours == "norm_eps" else field for field in OTHER_FIELDS),
        Field("num_local_experts", "n_expert", 8),
        Field("num_experts_per_tok", "expert_top_k", 2),
        Field("intermediate_size", "expert_size"),
    ),
    shared=SHARED,
    rows=_rows("block_sparse_moe", "w1", "w3", "w2"),
    read_more=lambda options: one_window(options, options.get("sliding_window", None), 1000000.0),
    write_more=write_one_window,
)


def read_qwen3_moe(options: Options) -> dict[str, Any]:
    experts = options.get("num_experts", None) or options.get("num_local_experts", 128)  # as transformers 5 writes it
    return one_window(options, used_window(options), 10000.0) | {"n_expert": experts}


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    every_block = {"decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": config.expert_dim}
    window = {"use_sliding_window": config.window is not None}
    return write_one_window(config) | every_block | window | {"num_experts": config.n_expert}


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    prefix="model.",
    fields=(
        *OTHER_FIELDS,
        Field("attention_bias", "attention_bias", False),
        Field("num_experts_per_tok", "expert_top_k", 8),
        Field("moe_intermediate_size", "expert_size", 768),
        Field("norm_topk_prob", "router_renormalize", False),
    ),
    shared=SHARED | {"qk_norm": True},
    rows=_rows("mlp", "gate_proj", "up_proj", "down_proj"),
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    read_more=read_qwen3_moe,
    write_more=write_qwen3_moe,
)
