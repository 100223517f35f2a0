"""Compares a model of transformers, random in every parameter, with the same model here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.data.bpe import bpe_tokenizer
from andrea_jax.engine import EngineConfig
from andrea_jax.interop.hugging_face import read_model, write_model
from andrea_jax.interop.hugging_face.architectures import ARCHITECTURES
from andrea_jax.interop.hugging_face.tokenizer_files import tokenizer_json
from andrea_jax.interop.hugging_face.tree import their_shapes, their_values
from andrea_jax.model import model_forward
from andrea_jax.sample_tokens import sample_tokens
from andrea_jax.sampling import SamplingConfig

torch = pytest.importorskip("torch", reason="parity needs torch: pip install 'andrea_jax[parity]'")
transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install 'andrea_jax[parity]'")

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
ENGINE = EngineConfig(blocks="scan", attention="explicit")
QUICKLY = {"xla_backend_optimization_level": 0}
ROUNDING = 1e-5  # float32 keeps 6e-8 of a number; some hundred sums and products follow one another


def random_model(config, vectors=0.3):
    """A model whose every parameter differs from where it starts, so that each one counts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = vectors if parameter.ndim == 1 else 0.7 * parameter.shape[-1] ** -0.5
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def saved(model, folder):
    """The folder, with a tokenizer of as many ids as the model has."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer_of(model.config.vocab_size)))
    return folder


def tokenizer_of(size):
    return bpe_tokenizer([[i, i + 1] for i in range(size - 257)], size - 257)


def some_tokens(vocab_size, shape=(2, 24)):
    return np.random.default_rng(0).integers(1, vocab_size, shape)


def distance(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1)  # an expert that no token chose has gradient 0


def check_parity(config, folder):
    """Logits, every gradient, and the tensors and the model written back."""
    model = random_model(config)
    read = read_model(saved(model, folder / "theirs"))
    assert read.notes == []
    tokens = some_tokens(config.vocab_size)
    check_numbers(model, read, tokens)
    check_written(model, read, folder / "ours", tokens)
    return model, read


def check_numbers(model, read, tokens):
    weights = np.random.default_rng(1).standard_normal((*tokens.shape, model.config.vocab_size), np.float32)
    logits = model(torch.from_numpy(tokens)).logits
    (logits * torch.from_numpy(weights)).sum().backward()

    def forward(params):
        logits = model_forward(params, jnp.asarray(tokens), read.config, ENGINE)
        return (logits * weights).sum(), logits

    gradients, ours = jax.jit(jax.grad(forward, has_aux=True), compiler_options=QUICKLY)(read.params)
    assert distance(ours, logits.detach()) < ROUNDING
    architecture = ARCHITECTURES[read.model_type]
    gradient_of = moved(gradients, architecture, read.config)
    theirs = as_saved(read.model_type, {name: parameter.grad for name, parameter in model.named_parameters()})
    for name in their_shapes(architecture, read.config):
        assert distance(gradient_of(name), theirs.pop(name)) < 3 * ROUNDING, name
    assert not theirs


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


def moved(gradients, architecture, config):
    """name -> gradient as their tensor lies; what a layout adds to a value is no part of it."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), gradients)
    one, other = (their_values(tree, architecture, config) for tree in (wide, jax.tree.map(np.zeros_like, wide)))
    return lambda name: one(name) - other(name)


def check_written(model, read, folder, tokens):
    written = write_model(folder, read.params, read.config, read.tokenizer, model_type=read.model_type)
    assert written.filled == {}
    back = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        found, expected = (m.eval()(torch.from_numpy(tokens)).logits for m in (back, model))
    assert torch.equal(found, expected)
    if not read.model_type.startswith("gemma"):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, back.state_dict()[name]), name


def check_greedy(config, folder):
    """The same tokens, of two prompts at once."""
    model, new = random_model(config, vectors=0.05), 16  # biases alone would decide on the same token each time
    read = read_model(saved(model, folder))
    prompts = some_tokens(config.vocab_size, (2, 7))
    with torch.no_grad():
        options = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = model.generate(torch.from_numpy(prompts), **options)[:, prompts.shape[1] :]
    steps = sample_tokens(
        read.params, list(prompts), np.ones(config.vocab_size, bool), read.config, SamplingConfig(temperature=0)
    )
    found = np.stack([next(steps) for _ in range(new)], axis=1)
    assert found.tolist() == expected.tolist()
    assert len(np.unique(found)) > 4
