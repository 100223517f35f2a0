"""The architectures by name, and which of them a model of ours is."""

from __future__ import annotations

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture
from andrea_jax.interop.hugging_face.gemma import GEMMA2, GEMMA3
from andrea_jax.interop.hugging_face.gpt2 import GPT2
from andrea_jax.interop.hugging_face.llama import LLAMA, MISTRAL, QWEN3
from andrea_jax.interop.hugging_face.mixtures import MIXTRAL, QWEN3_MOE
from andrea_jax.settings import UserError

ARCHITECTURES = {a.model_type: a for a in (GPT2, LLAMA, MISTRAL, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE)}


def architecture_named(model_type: object) -> Architecture:
    """Raises UserError for one that is not among them."""
    if model_type not in ARCHITECTURES:
        raise UserError(f"model_type = {model_type!r}: there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[str(model_type)]


def architecture_of(config: ModelConfig) -> Architecture:
    """The first that expresses the model exactly.

    Raises:
        UserError: none does; with what the nearest lacks.
    """
    lacking = {name: architecture.lacks(config) for name, architecture in ARCHITECTURES.items()}
    fitting = [name for name, reasons in lacking.items() if not reasons]
    if fitting:
        return ARCHITECTURES[fitting[0]]
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    raise UserError(
        f"no architecture of Hugging Face is this model; the nearest: {describe(nearest, lacking[nearest])}"
    )


def describe(model_type: str, reasons: list[str]) -> str:
    """`gpt2 (model != gpt2: norm: rms != layer)`."""
    return f"{model_type} (model != {model_type}: {'; '.join(reasons)})"
