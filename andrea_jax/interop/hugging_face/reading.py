"""A folder in Hugging Face's form becomes a model of ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import Tokenizer, load_tokenizer
from andrea_jax.interop.hugging_face.architecture import Architecture
from andrea_jax.interop.hugging_face.architectures import architecture_named
from andrea_jax.interop.hugging_face.options import Options
from andrea_jax.interop.hugging_face.safetensors_files import TensorFiles, read_json
from andrea_jax.interop.hugging_face.tokenizer_files import fitting, read_tokenizer
from andrea_jax.interop.hugging_face.tree import read_tree
from andrea_jax.parameters import Params
from andrea_jax.settings import UserError


class ReadModel(NamedTuple):
    """float32 NumPy parameters, what they are of, and what a user should know."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer
    model_type: str
    notes: list[str]


def read_model(folder: str | Path, context_length: int | None = None, tokenizer: str | Path | None = None) -> ReadModel:
    """The model in a folder that transformers wrote: the same function, in float32.

    `context_length` shortens the context of a model with rotary positions; `tokenizer` is a file to use instead of the
    folder's tokenizer.json.

    Raises:
        UserError: an option that our models lack, a tensor that is missing, too many or of another shape, by name.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json is in it; give a folder that save_pretrained wrote")
    options = Options(read_json(folder / "config.json"), str(folder / "config.json"))
    architecture, config = read_config(options)
    if context_length is not None:
        config = shortened(config, context_length)
    notes = [f"{options.place}: {name} is not used, as in transformers" for name in options.unused()]
    if tokenizer is not None:
        found = fitting(load_tokenizer(tokenizer), config.vocab_size)
    else:
        found, left_out = read_tokenizer(folder, dict(options.values), config.vocab_size)
        notes += [f"the tokenizer's {name} is left out: the model has no row for it" for name in left_out]
    params = read_tree(TensorFiles(folder), architecture, config)
    return ReadModel(params, config, found, architecture.model_type, notes)


def read_config(options: Options) -> tuple[Architecture, ModelConfig]:
    """The architecture that a config.json names, and the model that it describes."""
    model_type = options.get("model_type")
    try:
        architecture = architecture_named(model_type)
    except UserError as error:
        raise UserError(f"{options.place}: {error}") from None
    options.only("quantization_config")
    return architecture, architecture.read_config(options)


def shortened(config: ModelConfig, context_length: int) -> ModelConfig:
    """The config with a shorter context, which saves memory when text is generated."""
    if config.position != "rotary":
        raise UserError(f"--context_length: the model has {config.context_length} learned positions; leave it out")
    if not 1 <= context_length <= config.context_length:
        raise UserError(f"--context_length={context_length}: the model has {config.context_length}, and it can be less")
    return dataclasses.replace(config, context_length=context_length)
