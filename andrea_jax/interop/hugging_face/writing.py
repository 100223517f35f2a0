"""A model of ours becomes a folder in Hugging Face's form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.files import new_folder
from andrea_jax.interop.hugging_face.architectures import architecture_named, architecture_of, describe
from andrea_jax.interop.hugging_face.safetensors_files import DTYPES, write_tensors
from andrea_jax.interop.hugging_face.tokenizer_files import fitting, token_ids, write_tokenizer
from andrea_jax.interop.hugging_face.tree import their_shapes, their_values
from andrea_jax.parameters import Params, named_specs
from andrea_jax.settings import UserError


class WrittenModel(NamedTuple):
    """The architecture, the files of tensors, and what it needs beside the model's tensors: {name: ones or zeros}."""

    model_type: str
    files: list[str]
    filled: dict[str, str]


def write_model(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    model_type: str | None = None,
) -> WrittenModel:
    """Writes a folder that AutoModelForCausalLM and AutoTokenizer load, whole or not at all.

    The architecture is the first that expresses the model exactly, or `model_type`. Gains that it has and the model
    lacks become ones, shifts and biases zeros. Rows that pad the vocabulary are left out. A scale of the logits, muP's
    too, goes into the last norm, rounded. dtypes below float32 round.

    Raises:
        UserError: an architecture that does not express the model, with what it lacks; a folder that is not empty.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype = {dtype!r}: there are {', '.join(DTYPES)}")
    fitting(tokenizer, config.vocab_size)
    params, config = _without_scale(params, config)
    architecture = architecture_of(config) if model_type is None else architecture_named(model_type)
    reasons = architecture.lacks(config)
    if reasons:
        raise UserError(f"the model cannot be written as {describe(architecture.model_type, reasons)}")
    full = architecture.fill(config)
    ids = token_ids(tokenizer)
    options = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        **architecture.write_config(full),
        **ids,
        "pad_token_id": None,
    }
    with new_folder(Path(folder)) as temporary:
        _write_json(temporary / "config.json", options)
        _write_json(temporary / "generation_config.json", {"_from_model_config": True, **ids})
        write_tokenizer(temporary, tokenizer, full.context_length)
        shapes, values = their_shapes(architecture, full), their_values(params, architecture, full)
        files = write_tensors(temporary, shapes, values, dtype, shard_bytes)
    added = sorted(named_specs(full).keys() - named_specs(config).keys())
    filled = {name: "ones" if name.endswith(".gain") else "zeros" for name in added}
    return WrittenModel(architecture.model_type, files, filled)


def _without_scale(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The same function: the gain and shift of the last norm carry the scale of the logits, where it has them."""
    last = params.get("final_norm", {})
    if config.output_scale == 1 or "gain" not in last:
        return params, config
    last = {name: np.asarray(x) * np.float32(config.output_scale) for name, x in last.items()}
    scale = config.score_scale if config.mup_head else config.attention_scale
    changes: dict[str, Any] = {"attention_scale": scale, "logit_scale": 1.0, "mup_width": None, "mup_head": None}
    return {**params, "final_norm": last}, dataclasses.replace(config, **changes)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
