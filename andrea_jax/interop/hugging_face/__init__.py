"""Models in Hugging Face's form: a folder with config.json, safetensors and tokenizer.json."""

from andrea_jax.interop.hugging_face.reading import read_model
from andrea_jax.interop.hugging_face.writing import write_model

__all__ = ["read_model", "write_model"]
