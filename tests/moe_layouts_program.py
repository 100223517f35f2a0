"""Run by test_moe.py on 8 virtual devices: a model with experts on every kind of mesh, and what its devices send."""

import collections
import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from andrea_jax.checkpoint import open_for_saving, restore_state, save
from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.engine import EngineConfig
from andrea_jax.inspect.collectives import collectives_of
from andrea_jax.inspect.traffic import traffic
from andrea_jax.optimizer import OptimizerConfig, make_optimizer
from andrea_jax.parameters import init_params, named_specs
from andrea_jax.sharding import MeshConfig, row_shards, spec_sharding
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import (
    compile_step,
    run_mesh,
    sharded_abstract_state,
    sharded_init_state,
    state_shardings,
)
from andrea_jax.train.state import init_state
from andrea_jax.train.step import loss_and_gradient

ULP = 2.0**-23
B, T, V, D, L = 8, 8, 32, 16, 2
SIZES = dict(vocab_size=V, context_length=T, d_model=D, n_layer=L, n_head=8)
BLOCKS = ModelConfig(**SIZES, n_expert=8, n_shared_expert=1, balance_weight=0.3, router_z_weight=0.1, balance_bias=0.01)
PLACES = ModelConfig(**SIZES, n_expert=8, capacity_factor=0.7, balance_weight=0.3, gated=True, expert_size=24)
SIX = ModelConfig(**SIZES, n_expert=6, expert_top_k=3, n_shared_expert=1, gated=True, activation="silu")
LAYOUTS = [
    (BLOCKS, MeshConfig(expert=8), 1),
    (BLOCKS, MeshConfig(fsdp=2, expert=2, tensor=2), 1),
    (PLACES, MeshConfig(data=2, fsdp=2, tensor=2), 1),
    (PLACES, MeshConfig(expert=4, tensor=2), 1),
    (PLACES, MeshConfig(data=2, fsdp=2, expert=2), 1),
    (SIX, MeshConfig(expert=2, tensor=4), 2),
]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (B, T + 1))
BATCH = {
    "tokens_BT": jnp.int32(TOKENS[:, :-1]),
    "targets_BT": jnp.int32(TOKENS[:, 1:]),
    "weights_BT": jnp.float32(RNG.uniform(0, 2, (B, T))),
}


def run(model, mesh, parts=1, parallel="jit", kind="adamw"):
    train = TrainConfig(batch_size=B, accumulate=parts, parallel=parallel)
    return RunConfig(model, train=train, optimizer=OptimizerConfig(kind), mesh=mesh, engine=EngineConfig(blocks="scan"))


def gradient(config, placed=None):
    """Loss, gradients and routing, and the compiled program; of one device without a mesh."""
    params = init_params(jax.random.key(0), config.model)
    if placed is not None:
        params = jax.device_put(params, state_shardings(config, placed).params)
    compiled = jax.jit(lambda p: loss_and_gradient(p, BATCH, config, None, placed)).lower(params).compile()
    return compiled(params), compiled


def assert_equal(found, expected, what):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * ULP * np.abs(b).max(), err_msg=f"{what} {path}")


def sent(compiled, mesh):
    """The collectives of a compiled program, and the bytes that a device sends along axes of the mesh by each kind."""
    found = collectives_of(compiled.as_text(), mesh.shape, 8)
    amounts = collections.Counter()
    for collective in found:
        amounts[collective.axes, collective.kind] += collective.sent
    return found, amounts


def scattered(config, mesh):
    """Bytes that a device sends over `fsdp` of the gradients of what is within a mixture."""
    specs = [spec for name, spec in named_specs(config.model).items() if name.startswith("blocks.moe")]
    parts = [spec_sharding(mesh, spec.axes) for spec in specs]
    held = [math.prod(p.shard_shape(s.shape)) for p, s in zip(parts, specs, strict=True) if "fsdp" in p.spec]
    return 4 * sum(held) * (mesh.shape["fsdp"] - 1) * config.train.accumulate


alone = {model: gradient(run(model, MeshConfig()))[0] for model in (BLOCKS, PLACES, SIX)}
for model, layout, parts in LAYOUTS:
    config = run(model, layout, parts)
    mesh = run_mesh(config)
    found, compiled = gradient(config, mesh)
    assert_equal(found, alone[model], layout)
    collectives, amounts = sent(compiled, mesh)
    formula = traffic(config, 8)
    for kind in ("all-to-all", "all-gather", "reduce-scatter"):  # tokens there and back, their gradients too
        assert amounts[("expert",), kind] == formula.get((("expert",), kind), 0), (layout, kind)
    assert amounts[("fsdp",), "reduce-scatter"] == scattered(config, mesh), layout  # XLA's own are for GPUs only
    # As often as a dense model: twice a block each way, for the table, and for the gradient of the last activations.
    stream = 4 * B * T * D // row_shards(mesh) // parts
    sums = [c for c in collectives if c.axes == ("tensor",) and c.operand_bytes >= stream]
    often = (4 * L + 2) * parts if mesh.shape["tensor"] > 1 else 0
    assert sum(c.times for c in sums) == often, (layout, sums)

# Muon: four layers are dealt out over `fsdp` and `expert`, those of experts, which lie along that already, over `fsdp`
# and `tensor`; along `expert` only what became of all others is sent.
model = dataclasses.replace(BLOCKS, n_layer=4)
config = run(model, MeshConfig(fsdp=2, expert=2, tensor=2), kind="muon")
mesh = run_mesh(config)
start, grads = init_state(config), init_params(jax.random.key(1), model)
directions = []
for on, place in ((None, None), (mesh, state_shardings(config, mesh))):
    optimizer = make_optimizer(config.optimizer, model, on)
    args = (grads, start.optimizer, start.params)
    shardings = place and (place.params, place.optimizer, place.params)
    args = args if place is None else jax.device_put(args, shardings)
    step = jax.jit(optimizer.update, out_shardings=shardings and shardings[:2]).lower(*args).compile()
    directions.append(step(*args))
assert_equal(directions[1], directions[0], "muon")
moved = [c for c in sent(step, mesh)[0] if c.operand_bytes > 64]  # norms
kinds = {
    (("fsdp",), "all-to-all"),
    (("tensor",), "all-to-all"),
    (("tensor",), "all-gather"),
    (("expert",), "all-gather"),
}
assert {(c.axes, c.kind) for c in moved} == kinds, moved
parts = [
    math.prod(spec_sharding(mesh, spec.axes).shard_shape(spec.shape)) // 2
    for spec in named_specs(model).values()
    if spec.matrix and "expert" not in spec.axes
]
assert sum(c.operand_bytes for c in moved if c.axes == ("expert",)) == 2 * 4 * sum(parts)  # directions and momentum

states, losses = [], []
for layout, parallel in ((MeshConfig(data=4, expert=2), "jit"), (MeshConfig(), "pmap")):
    config = run(BLOCKS, layout, parallel=parallel)
    mesh = run_mesh(config)
    state, metrics = compile_step(config, mesh)(sharded_init_state(config, mesh), BATCH)
    losses.append(float(metrics["loss"]))
    states.append(state)
    np.testing.assert_allclose(
        np.abs(np.asarray(state.params["blocks"]["moe"]["router_bias"])).max(), 0.01, rtol=4 * ULP
    )
np.testing.assert_allclose(losses[1], losses[0], rtol=16 * ULP)

# What one mesh saved another restores, and saved by that a third.
meta = {"model": dataclasses.asdict(BLOCKS), "tokenizer": bytes_tokenizer().to_dict(), "settings": {}, "tokens": 0}
state = states[0]
for layout in (MeshConfig(fsdp=2, expert=4), MeshConfig(expert=2, tensor=4), MeshConfig(fsdp=8)):
    config = run(BLOCKS, layout)
    mesh = run_mesh(config)
    with tempfile.TemporaryDirectory() as folder:
        with open_for_saving(Path(folder), 1) as manager:
            save(manager, state, meta, None)
        state = restore_state(Path(folder), 1, sharded_abstract_state(config, mesh))
    w_1 = state.params["blocks"]["moe"]["w_1"]
    assert w_1.sharding == spec_sharding(mesh, named_specs(BLOCKS)["blocks.moe.w_1"].axes), layout
    assert w_1.addressable_shards[0].data.size == w_1.size // 8
    jax.tree.map(np.testing.assert_array_equal, state, states[0])
print(len(LAYOUTS) + 2, "layouts")
