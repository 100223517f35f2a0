"""Where deep models of each kind start: near chance, with a stream and gradients that no depth blows up or drowns."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import causal_attend
from andrea_jax.loss import loss_fn
from andrea_jax.model import block_forward
from andrea_jax.parameters import init_params, path_name

B, T, V, D, L = 8, 32, 1000, 64, 12
SCALED = dict(embedding_scale=math.sqrt(D))
LLAMA = dict(norm="rms", norm_shift=False, position="rotary", activation="silu", gated=True, mlp_bias=False)
MODELS = {
    "llama": LLAMA,
    "llama, untied": LLAMA | dict(tie_embeddings=False),
    "post": dict(norm_position="post"),
    "post, no final norm": dict(norm_position="post", final_norm=False, **SCALED),
    "post, no gains": dict(norm_position="post", final_norm=False, norm_gain=False),
    "sandwich": dict(norm_position="sandwich"),
    "gemma": LLAMA | SCALED | dict(norm_position="sandwich"),
    "parallel": dict(parallel_block=True),
    "no gains": dict(norm_gain=False, norm_shift=False),
    "no final norm": dict(final_norm=False),
    "no final norm, scaled": dict(final_norm=False, **SCALED),
    "scaled": SCALED,
    "no norm": dict(norm="none"),
    "rezero": dict(norm="none", branch_gain=0.0, **SCALED),
    "relu2": dict(activation="relu2", position="alibi"),
    "muP": dict(mup_width=16),
    "muP, untied": LLAMA | dict(mup_width=16, tie_embeddings=False),
    "qk_norm": dict(qk_norm=True, position="rotary", gated=True),
}
TOKENS = np.random.default_rng(0).integers(0, V, (B, T + 1))
BATCH = {"tokens_BT": TOKENS[:, :-1], "targets_BT": TOKENS[:, 1:], "weights_BT": np.ones((B, T), np.float32)}


class Start(NamedTuple):
    loss: jax.Array
    gradients: dict
    streams: jax.Array  # root mean square of the embeddings and behind each block
    changes: jax.Array  # of what each block adds


def rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x)))


@functools.cache
def start(name):
    config = ModelConfig(vocab_size=V, context_length=T, d_model=D, n_layer=L, n_head=4, **MODELS[name])
    engine = EngineConfig(blocks="scan")

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def measure(params):
        (loss, _), gradients = jax.value_and_grad(lambda p: loss_fn(p, BATCH, config, engine), has_aux=True)(params)
        x_BTD = params["token_embedding"][BATCH["tokens_BT"]] * config.embedding_scale
        x_BTD = x_BTD + params["position_embedding"] if config.position == "learned" else x_BTD

        def block(x_BTD, p):
            y_BTD = block_forward(p, x_BTD, config, causal_attend(config, engine))
            return y_BTD, (rms(y_BTD), rms(y_BTD - x_BTD))

        _, (streams, changes) = jax.lax.scan(block, x_BTD, params["blocks"])
        return Start(loss, gradients, jnp.concatenate([rms(x_BTD)[None], streams]), changes)

    return config, jax.device_get(measure(init_params(jax.random.key(0), config)))


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_starts_near_chance(name):
    """Logits of variance v cost v / 2 more. A tied model's are of variance 1/D or 1/sqrt(D), an untied one's 2/5; and
    the logit of a token that predicts itself is at most D^(1/4) of a thousand."""
    config, found = start(name)
    variance = 1 / math.sqrt(D) if config.tie_embeddings else 2 / 5
    spread = 5 * math.sqrt(variance / (B * T))  # of the mean of so many targets' logits
    assert -spread < found.loss - math.log(V) < variance / 2 + spread + math.exp(D**0.25) / V


@pytest.mark.parametrize("name", MODELS)
def test_each_block_starts_as_nearly_the_identity(name):
    """Two branches add at most 1/sqrt(2L) of the stream each, of all blocks together as much as there was."""
    config, found = start(name)
    inner = slice(1, -1) if config.norm_position == "post" else slice(None)  # the first norm makes it 1, the last small
    relative = (found.changes / found.streams[:-1])[inner]
    assert np.all(relative < 1.05 * math.sqrt(2) / math.sqrt(2 * L))
    assert np.all(relative > 0.2 / math.sqrt(2 * L)) or config.branch_gain == 0
    streams = found.streams[1:-1] if config.norm_position == "post" else found.streams
    assert np.all((streams > 0.9 * streams[0]) & (streams < 1.5 * streams[0]))
    if config.norm_position == "post":
        np.testing.assert_allclose(streams, 1, rtol=1e-2)
    if config.embedding_scale > 1 and config.norm_position != "post":
        assert 0.3 < streams[0] < 1.5


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_tensor_and_no_depth_changes_their_size(name):
    config, found = start(name)
    for path, gradient in jax.tree.leaves_with_path(found.gradients):
        assert np.all(np.isfinite(gradient)), path_name(path)
        still = config.branch_gain == 0 and not path_name(path).endswith("gain") and "blocks" in path_name(path)
        assert np.any(gradient) != still, path_name(path)  # ReZero's branches wait for their gains
    blocks = jax.tree.leaves(found.gradients["blocks"])
    sizes = [math.sqrt(sum(np.square(leaf[layer]).sum() for leaf in blocks)) for layer in range(L)]
    assert max(sizes) < 2.5 * min(sizes)
