"""Steps with experts, compiled for eight H200s: they send what the formula says and compute no more than fsdp does."""

import collections
import functools

import pytest

from andrea_jax import EngineConfig, ModelConfig
from andrea_jax.inspect.compiled_step import Cluster, compiled_step
from andrea_jax.inspect.traffic import traffic
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig

pytestmark = pytest.mark.aot
B, T, D, V = 32, 128, 256, 512
LAYOUTS = {
    "blocks over data, fsdp and expert": (MeshConfig(data=2, fsdp=2, expert=2), None),
    "places over fsdp, expert and tensor": (MeshConfig(fsdp=2, expert=2, tensor=2), 1.0),
    "blocks over fsdp": (MeshConfig(fsdp=8), None),
    "places over fsdp": (MeshConfig(fsdp=8), 1.0),
}
WIDE = list(LAYOUTS)[:2]


def run_config(layout):
    mesh, factor = LAYOUTS[layout]
    mixture = dict(n_expert=8, expert_size=512, n_shared_expert=1, capacity_factor=factor)
    model = ModelConfig(
        vocab_size=V, d_model=D, n_layer=2, n_head=4, context_length=T, position="rotary", tie_embeddings=False,
        gated=True, activation="silu", mlp_bias=False, **mixture,
    )  # fmt: skip
    engine = EngineConfig(dtype="bfloat16", attention="cudnn", blocks="scan", remat="block")
    return RunConfig(
        model, train=TrainConfig(batch_size=B), optimizer=OptimizerConfig("adamw"), engine=engine, mesh=mesh
    )


@functools.cache
def step(layout):
    return compiled_step(run_config(layout), Cluster("h200", 1, 8))


@pytest.mark.parametrize("layout", WIDE)
def test_each_collective_moves_what_the_formula_says(layout):
    """So tokens and the gradients of matrices move in bfloat16, and a gradient is scattered before copies add it. Where
    blocks are recomputed XLA gathers choices and their weights, 8 of 1,568 bytes a token each, three times for four.
    """
    expected, found = traffic(run_config(layout), 8), collections.Counter()
    for collective in step(layout).collectives:
        found[collective.axes, collective.kind] += collective.sent
    for key, amount in expected.items():
        if key[1] != "all-reduce" or key == (("data",), "all-reduce"):
            assert found[key] == pytest.approx(amount, rel=0.006), key
        else:  # vectors are reduced along with others, the loss adds three numbers a token over `tensor`
            assert 0.9 * amount < found[key] < 1.005 * amount + 2000, key
    assert sum(amount for key, amount in found.items() if key not in expected) < 1000  # norms and counts


@pytest.mark.parametrize("layout", WIDE)
def test_no_layout_computes_more_than_fsdp_alone(layout):
    alone = step(layout.partition(" ")[0] + " over fsdp")
    assert step(layout).flops == pytest.approx(alone.flops, rel=0.01)
