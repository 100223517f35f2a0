"""Run by test_moe.py on 8 virtual devices: one step of a model with experts on every kind of mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.model import model_forward
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import compile_step, run_mesh, sharded_init_state
from andrea_jax.train.step import loss_and_gradient

ULP = 2.0**-23
T, V = 8, 32
SIZES = dict(vocab_size=V, context_length=T, d_model=16, n_layer=2, n_head=8)
DENSE = ModelConfig(**SIZES)
EXPERTS = ModelConfig(
    **SIZES, n_expert=8, n_shared_expert=1, balance_weight=0.3, router_z_weight=0.1, balance_bias=0.01
)
TIGHT = ModelConfig(**SIZES, n_expert=8, capacity_factor=0.7, balance_weight=0.3, gated=True, mlp_bias=True)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (8, T + 1))
BATCH = {
    "tokens_BT": jnp.int32(TOKENS[:, :-1]),
    "targets_BT": jnp.int32(TOKENS[:, 1:]),
    "weights_BT": jnp.float32(RNG.uniform(0, 2, (8, T))),
}


def run(model, mesh, parallel="jit"):
    train = TrainConfig(batch_size=8, parallel=parallel)
    return RunConfig(
        model, train=train, optimizer=OptimizerConfig("adamw"), mesh=mesh, engine=EngineConfig(blocks="scan")
    )


def gradient(model, mesh):
    config = run(model, mesh)
    placed = run_mesh(config)
    params = sharded_init_state(config, placed).params
    return jax.jit(lambda p: loss_and_gradient(p, BATCH, config, None, placed))(params)


def assert_equal(found, expected, what):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * ULP * np.abs(b).max(), err_msg=f"{what} {path}")


def collectives(model, mesh):
    config = run(model, mesh)
    placed = run_mesh(config)
    params = sharded_init_state(config, placed).params
    forward = jax.jit(lambda p, tokens: model_forward(p, tokens, model, config.engine, mesh=placed))
    return re.findall(
        r" (all-\S+?|collective-\S+?|reduce-scatter)\(", forward.lower(params, BATCH["tokens_BT"]).compile().as_text()
    )


LAYOUTS = [
    MeshConfig(8),
    MeshConfig(1, 8),
    MeshConfig(1, 1, 8),
    MeshConfig(expert=8),
    MeshConfig(data=2, fsdp=2, expert=2),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(expert=4, tensor=2),
]
for model in (EXPERTS, TIGHT):
    config = run(model, MeshConfig(8))
    alone = jax.jit(lambda p, c=config: loss_and_gradient(p, BATCH, c, None))(
        sharded_init_state(config, run_mesh(config)).params
    )
    for layout in LAYOUTS:
        import time; t0 = time.time(); assert_equal(gradient(model, layout), alone, layout); print(layout, time.time()-t0)

# Experts over `tensor`: what they give is summed as the parts of a dense MLP are, and no token changes its device.
split, dense = collectives(TIGHT, MeshConfig(1, 1, 8)), collectives(DENSE, MeshConfig(1, 1, 8))
assert sorted(split) == sorted(dense), (split, dense)
assert "all-reduce" in split
assert "all-to-all" not in split

losses = []
for parallel in ("jit", "pmap"):
    config = run(EXPERTS, MeshConfig(8), parallel)
    mesh = run_mesh(config)
    state, metrics = compile_step(config, mesh)(sharded_init_state(config, mesh), BATCH)
    losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(
        np.abs(np.asarray(state.params["blocks"]["moe"]["router_bias"])).max(), 0.01, rtol=4 * ULP
    )
np.testing.assert_allclose(losses[1], losses[0], rtol=16 * ULP)
print(len(LAYOUTS) + 1, "layouts")
