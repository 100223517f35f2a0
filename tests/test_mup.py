"""muP's coordinate check (Yang et al. 2022, appendix D.1): training moves every activation as far at any width."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.model import block_forward, final_norm, output_logits
from andrea_jax.optimizer import OptimizerConfig, make_optimizer, width_factor
from andrea_jax.parameters import init_params, named_specs
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import State
from andrea_jax.train.step import make_train_step

B, T, V, STEPS = 8, 16, 64, 4
WIDTHS = (32, 256)
TOKENS = np.random.default_rng(0).integers(0, V, (B, T + 1))
BATCH = {"tokens_BT": TOKENS[:, :-1], "targets_BT": TOKENS[:, 1:], "weights_BT": np.ones((B, T), np.float32)}
ENGINE = EngineConfig(blocks="scan")
QUICKLY = {"xla_backend_optimization_level": 0}


def model(width, **changes):
    sizes = dict(vocab_size=V, context_length=T, d_model=width, n_layer=2, n_head=width // 16)
    return ModelConfig(**sizes | changes)


def activations(params, config):
    """The stream behind the embeddings and behind each block, and the logits."""
    x = params["token_embedding"][BATCH["tokens_BT"]]
    x = x + params["position_embedding"] if config.position == "learned" else x
    found = {"embeddings": x}
    for layer in range(config.n_layer):
        x = block_forward(jax.tree.map(lambda stacked, i=layer: stacked[i], params["blocks"]), x, config)
        found[f"block {layer}"] = x
    return found | {"logits": output_logits(params, final_norm(params, x, config), config)}


@functools.cache
def growth(kind, changes):
    """By which power of the width the change of each activation grows."""
    changed = []
    for width in WIDTHS:
        config = model(width, **dict(changes))
        run = RunConfig(
            config,
            TrainConfig(batch_size=B),
            optimizer=OptimizerConfig(kind, weight_decay=0.0, clip_norm=None),
            schedule=ScheduleConfig("constant", peak=0.003, warmup=0),
            engine=ENGINE,
        )
        params = init_params(jax.random.key(0), config)
        state = State(jnp.int32(0), params, make_optimizer(run.optimizer, config).init(params))
        step = jax.jit(make_train_step(run), compiler_options=QUICKLY)
        for _ in range(STEPS):
            state, _ = step(state, BATCH)
        look = jax.jit(lambda p, c=config: activations(p, c), compiler_options=QUICKLY)
        before, after = look(params), look(state.params)
        changed.append({name: float(jnp.sqrt(jnp.mean((after[name] - before[name]) ** 2))) for name in before})
    narrow, wide = changed
    return {name: np.log(wide[name] / narrow[name]) / np.log(WIDTHS[1] / WIDTHS[0]) for name in narrow}


MUP = (("mup_width", 32),)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("adamw", MUP), ("muon", (*MUP, ("tie_embeddings", False)))])
def test_training_moves_every_activation_as_far_at_eight_times_the_width(kind, changes):
    """A power of 0.12 makes a quarter of a factor of 8. The random part of a first logit falls as width^-1/2."""
    found = growth(kind, changes)
    for name in ("embeddings", "block 0", "block 1"):
        assert abs(found[name]) < 0.12, (name, found[name])
    assert -0.5 < found["logits"] < 0.12


@pytest.mark.slow
def test_without_it_wider_blocks_move_further():
    """An Adam step adds up over the inputs of a matrix: a power of 1, less what the stream's smaller start takes."""
    found = growth("adamw", ())
    assert found["block 0"] > 0.5
    assert found["block 1"] > 0.5


def test_the_factors_by_hand_at_four_times_the_width():
    config = model(128, mup_width=32, n_expert=4, tie_embeddings=False, mlp_bias=True)
    adamw, muon = (
        {name: width_factor(OptimizerConfig(kind), config, spec) for name, spec in named_specs(config).items()}
        for kind in ("adamw", "muon")
    )
    matrices = {"attention.qkv": 1 / 2, "attention.out": 1 / 2, "moe.w_1": 1 / 2, "moe.w_2": 1 / 2, "moe.router": 1 / 4}
    matrices = {f"blocks.{name}": factor for name, factor in matrices.items()}
    assert adamw == {name: 1 / 4 if name in matrices else 1 for name in adamw}
    assert muon == pytest.approx({name: matrices.get(name, 1) for name in muon})


def test_at_its_own_width_nothing_changes():
    plain, same = model(32, tie_embeddings=False), model(32, tie_embeddings=False, mup_width=32)
    a, b = (init_params(jax.random.key(0), config) for config in (plain, same))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert (same.output_scale, same.score_scale) == (plain.output_scale, plain.score_scale)
    assert {width_factor(OptimizerConfig("muon"), same, spec) for spec in named_specs(same).values()} == {1.0}


def test_scores_are_divided_by_the_head_width_where_it_grows():
    """q k of trained queries and keys grows as their width: 1/H, which is 1/sqrt(H) at the width of a head there."""
    config = ModelConfig(d_model=256, n_head=4, mup_width=64, mup_head=16)
    assert config.score_scale == 4 / 64
    assert ModelConfig(d_model=256, n_head=16, mup_width=64).score_scale == 1 / 4


def test_decay_is_not_made_smaller():
    config = model(128, mup_width=32)
    params = init_params(jax.random.key(0), config)
    optimizer = make_optimizer(OptimizerConfig("adamw", weight_decay=0.5), config)
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_array_equal(direction["blocks"]["mlp"]["w_1"], 0.5 * params["blocks"]["mlp"]["w_1"])
