"""Asks transformers, or reads what it said before.

ANDREA_PARITY=FOLDER pytest tests/interop keeps what transformers says where torch is installed; where it is not, the
same tests read it. So a jax is tested on a Python that has no torch.
"""

from __future__ import annotations

import shutil

import numpy as np

from andrea_jax.data.bpe import bpe_tokenizer
from andrea_jax.interop.hugging_face.tokenizer_files import tokenizer_json

try:
    import torch
    import transformers
except ModuleNotFoundError:
    torch = transformers = None
else:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def answer(folder, ask, ours=None):
    """The arrays that ask() returns, kept in `folder` with the files it writes there; without torch, those kept before.

    It may look at the folder `ours`, whose bytes are kept too: what was kept says nothing of others.
    """
    if torch:
        folder.mkdir(parents=True)
        if ours:
            shutil.copytree(ours, folder / "ours")
        np.savez(folder / "answer.npz", **ask())
    elif ours:
        now, then = ({path.name: path.read_bytes() for path in at.iterdir()} for at in (ours, folder / "ours"))
        assert now.keys() == then.keys()
        assert [name for name in now if now[name] != then[name]] == []
    with np.load(folder / "answer.npz") as arrays:
        return dict(arrays)


def random_model(model_type, options, vectors=0.3):
    """A model whose every parameter differs from where it starts, so that each one counts."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = vectors if parameter.ndim == 1 else 0.7 * parameter.shape[-1] ** -0.5
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def save(model, folder):
    """With a tokenizer of as many ids as the model has."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer_of(model.config.vocab_size)))


def tokenizer_of(size):
    return bpe_tokenizer([[i, i + 1] for i in range(size - 257)], size - 257)


def some_tokens(vocab_size, shape=(2, 24)):
    return np.random.default_rng(0).integers(1, vocab_size, shape)


def their_numbers(model_type, options, folder):
    """Also saves the model in `folder`. Gradients have the names of its tensors there."""
    model = random_model(model_type, options)
    save(model, folder)
    tokens = some_tokens(model.config.vocab_size)
    weights = np.random.default_rng(1).standard_normal((*tokens.shape, model.config.vocab_size), np.float32)
    logits = model(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(weights)).sum().backward()
    gradients = as_saved(model_type, {name: parameter.grad for name, parameter in model.named_parameters()})
    return dict(tokens=tokens, weights=weights, logits=logits.detach(), **gradients)


def as_saved(model_type, tensors):
    """Tensors by the names of the files: in memory, all experts of a block lie in one."""
    found = {}
    for name, tensor in tensors.items():
        place, experts, part = name.partition(".experts.")
        if model_type == "mixtral":
            name, place = (text.replace(".mlp.gate", ".block_sparse_moe.gate") for text in (name, place))
            place = place.replace(".mlp", ".block_sparse_moe")
        if not experts:
            found[name] = tensor
            continue
        parts = ("w1", "w3") if model_type == "mixtral" else ("gate_proj", "up_proj")
        parts = parts if part == "gate_up_proj" else ("w2",) if model_type == "mixtral" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{place}.experts.{expert}.{part}.weight"] = piece
    return found
