"""Compares a model of transformers, random in every parameter, with the same model here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from interop.asking import answer, load, random_model, save, some_tokens, their_numbers, torch

from andrea_jax.engine import EngineConfig
from andrea_jax.interop.hugging_face import read_model, write_model
from andrea_jax.interop.hugging_face.architectures import ARCHITECTURES
from andrea_jax.interop.hugging_face.tree import their_shapes, their_values
from andrea_jax.model import model_forward
from andrea_jax.sample_tokens import sample_tokens
from andrea_jax.sampling import SamplingConfig

ENGINE = EngineConfig(blocks="scan", attention="explicit")
QUICKLY = {"xla_backend_optimization_level": 0}
ROUNDING = 1e-5  # float32 keeps 6e-8 of a number; some hundred sums and products follow one another


def distance(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1)  # an expert that no token chose has gradient 0


def check_parity(model_type, options, record, tmp_path):
    """Logits, every gradient, and the tensors and the model written back."""
    theirs = answer(record / "theirs", lambda: their_numbers(model_type, options, record / "theirs"))
    read = read_model(record / "theirs")
    assert read.notes == []
    assert read.model_type == model_type
    check_numbers(theirs, read)
    check_written(read, tmp_path / "ours", record)


def check_numbers(theirs, read):
    tokens, weights, logits = (theirs.pop(name) for name in ("tokens", "weights", "logits"))

    def forward(params):
        logits = model_forward(params, jnp.asarray(tokens), read.config, ENGINE)
        return (logits * weights).sum(), logits

    gradients, ours = jax.jit(jax.grad(forward, has_aux=True), compiler_options=QUICKLY)(read.params)
    assert distance(ours, logits) < ROUNDING
    architecture = ARCHITECTURES[read.model_type]
    gradient_of = moved(gradients, architecture, read.config)
    for name in their_shapes(architecture, read.config):
        assert distance(gradient_of(name), theirs.pop(name)) < 3 * ROUNDING, name
    assert not theirs


def moved(gradients, architecture, config):
    """name -> gradient as their tensor lies; what a layout adds to a value is no part of it."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), gradients)
    one, other = (their_values(tree, architecture, config) for tree in (wide, jax.tree.map(np.zeros_like, wide)))
    return lambda name: one(name) - other(name)


def check_written(read, ours, record):
    """transformers finds the model it saved in what is written of it here."""
    written = write_model(ours, read.params, read.config, read.tokenizer, model_type=read.model_type)
    assert written.filled == {}

    def ask():
        back, model = load(ours), load(record / "theirs")
        tokens = torch.from_numpy(some_tokens(model.config.vocab_size))
        with torch.no_grad():
            assert torch.equal(back(tokens).logits, model(tokens).logits)
        if not read.model_type.startswith("gemma"):
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, back.state_dict()[name]), name
        return {}

    answer(record / "written", ask, ours)


def check_greedy(model_type, options, record):
    """The same tokens, of two prompts at once."""
    new = 16

    def ask():
        model = random_model(model_type, options, vectors=0.05)  # biases alone would decide on the same token each time
        save(model, record)
        prompts = some_tokens(model.config.vocab_size, (2, 7))
        with torch.no_grad():
            how = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
            return {"prompts": prompts, "new": model.generate(torch.from_numpy(prompts), **how)[:, prompts.shape[1] :]}

    theirs = answer(record, ask)
    read = read_model(record)
    any_token = np.ones(read.config.vocab_size, bool)
    steps = sample_tokens(read.params, list(theirs["prompts"]), any_token, read.config, SamplingConfig(temperature=0))
    found = np.stack([next(steps) for _ in range(new)], axis=1)
    assert found.tolist() == theirs["new"].tolist()
    assert len(np.unique(found)) > 4
