"""Steps with experts, compiled for eight H200s: they send what the formula says and compute no more than fsdp does."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from bench.hlo_kernels import bytes_of, total

from andrea_jax import EngineConfig, ModelConfig
from andrea_jax.inspect.compile_for import compile_for
from andrea_jax.inspect.compiled_step import Cluster, compiled_step
from andrea_jax.inspect.traffic import traffic
from andrea_jax.layers.expert_product import expert_product
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
    """A little less where experts lie over devices: the gradients of blocks are added by a product with all of them."""
    alone = step(layout.partition(" ")[0] + " over fsdp")
    assert 0.97 * alone.flops < step(layout).flops < 1.01 * alone.flops


def test_blocks_go_through_their_experts_at_once():
    """40 blocks of 512 rows, 8 experts of 768 x 768: a loop over the blocks launches 200 kernels and moves 802 MB
    forward, 500 and 1,623 MB with what comes back; at least 72 and 177 would have to move."""
    x, w = jnp.zeros((40, 512, 768), jnp.bfloat16), jnp.zeros((8, 768, 768), jnp.bfloat16)
    expert = jnp.zeros(40, jnp.int32)

    def back(x, w, expert, dy):
        return jax.vjp(lambda x, w: expert_product(x, w, expert), x, w)[1](dy)

    for f, arguments, most, megabytes in ((expert_product, (x, w, expert), 3, 167), (back, (x, w, expert, x), 6, 428)):
        kernels = bytes_of(compile_for("h200", f, *arguments))
        assert sum(kernel.times for kernel in kernels) <= most
        assert total(kernels) < megabytes * 1e6
