"""Training steps compiled for 8 and 64 described GPUs: what they send is what the formula says."""

import collections
import dataclasses
import functools
import math
import re

import pytest

from andrea_jax import EngineConfig, andrea_120m
from andrea_jax.inspect.compiled_step import Cluster, compiled_step, on_gpus
from andrea_jax.inspect.flops import flops_per_token
from andrea_jax.inspect.traffic import traffic
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import count_parameters, named_specs
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig

pytestmark = pytest.mark.aot
HOST, HOSTS = Cluster("h200", 1, 8), Cluster("h200", 8, 8)
B, T, D, H = 128, 256, 512, 64
MODEL = andrea_120m(
    d_model=D, n_head=D // H, n_layer=3, context_length=T, vocab_size=2305, vocab_multiple=128, tie_embeddings=False
)
LAYOUTS = {
    "tensor": ((2, 2, 2), HOST, "block"),
    "fsdp": ((1, 8, 1), HOST, "none"),
    "hosts": ((8, 8, 1), HOSTS, "block"),
    "across": ((2, 4, 8), HOSTS, "none"),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def run_config(layout, **model):
    mesh, _, remat = LAYOUTS[layout]
    return on_gpus(
        RunConfig(
            model=dataclasses.replace(MODEL, **model),
            train=TrainConfig(batch_size=B),
            optimizer=OptimizerConfig("adamw"),
            engine=EngineConfig(blocks="scan", remat=remat),
            mesh=MeshConfig(*mesh),
        )
    )


@functools.cache
def step(layout):
    return compiled_step(run_config(layout), LAYOUTS[layout][1])


@layouts
def test_each_collective_moves_what_the_formula_says(layout):
    """To the byte, but for two things. XLA keeps what it gathered of blocks for the backward pass where they are not
    recomputed; and with `data` and `fsdp` it sums the positions' gradient over both at once, split over neither.
    """
    (data, fsdp, _), cluster, remat = LAYOUTS[layout]
    expected, found = traffic(run_config(layout), cluster.devices), collections.Counter()
    for collective in step(layout).collectives:
        found[collective.axes, collective.kind] += collective.sent
    blocks, positions = 2 * matrices(layout), 4 * T * D
    if remat == "none":
        expected[("fsdp",), "all-gather"] -= blocks * (fsdp - 1) / fsdp
    if data > 1:
        expected[("fsdp",), "reduce-scatter"] -= positions * (fsdp - 1) / fsdp
        expected[("data",), "all-reduce"] -= 2 * positions / fsdp * (data - 1) / data
        expected[("data", "fsdp"), "all-reduce"] += 2 * positions * (1 - 1 / (data * fsdp))
    for key, amount in expected.items():
        if key[1] != "all-reduce" or key == (("data",), "all-reduce"):
            assert found[key] == amount, key
        else:  # some vectors are summed in bfloat16; the loss adds three numbers a token over `tensor`
            assert 0.9 * amount < found[key] < 1.002 * amount, key
    assert sum(amount for key, amount in found.items() if key not in expected) < 1000  # norms and counts


def matrices(layout):
    """Elements of the blocks' matrices on each device of an fsdp group, once gathered."""
    tensor = LAYOUTS[layout][0][2]
    return sum(math.prod(spec.shape) for spec in named_specs(MODEL).values() if spec.matrix) // tensor


@layouts
def test_attention_in_cudnn_keeps_to_the_rows_and_heads_of_each_device(layout):
    data, fsdp, tensor = LAYOUTS[layout][0]
    local = f"bf16[{B // (data * fsdp)},{T},{D // H // tensor},{H}]"
    calls = re.findall(
        r'custom_call_target="(__cudnn\$fmha\w+)", operand_layout_constraints={(.*?)}, api', step(layout).text
    )
    assert {target for target, _ in calls} == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    for _, operands in calls:
        assert set(re.findall(r"bf16\[[\d,]*\]", operands)) == {local}


def test_what_a_device_holds_adds_up_to_what_was_compiled():
    state, held = 4 * count_parameters(MODEL), step("tensor")
    vectors = 4 * sum(math.prod(s.shape) for s in named_specs(MODEL).values() if s.axes[1:] in ((), ("embed",)))
    assert state / 4 < held.parameters < state / 4 + vectors + 4 * T * D  # the positions are split over fsdp alone
    assert held.optimizer == 2 * held.parameters + 4
    assert held.batch == 3 * 4 * B * T // 4
    assert 0 < held.other < 1024  # the step's number, metrics, alignment


def test_products_are_those_of_the_formula_and_what_is_recomputed():
    """Backward attention makes its scores again: 7 products of T x T for 6. Recomputing blocks repeats 8 of 12 D x D
    matrices, all but `w_2`, and attention forward."""
    attention, blocks = 2 * T * D * MODEL.n_layer, 2 * 12 * D * D * MODEL.n_layer
    for layout, again in (("fsdp", attention / 2), ("tensor", 1.5 * attention + 8 / 12 * blocks)):
        tokens = B * T / LAYOUTS[layout][1].devices
        assert step(layout).flops / tokens == pytest.approx(flops_per_token(MODEL) + again, rel=0.01)


def test_pmap_sends_what_its_formula_says_and_holds_everything():
    config = run_config("across", n_layer=1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="pmap"), mesh=MeshConfig(8))
    made, size = compiled_step(config, HOST), 4 * count_parameters(config.model)
    ((key, amount),) = traffic(config, 8).items()
    gradient = max(made.collectives, key=lambda collective: collective.sent)
    assert (gradient.axes, gradient.kind, gradient.times) == (*key, 1)
    assert amount <= made.sent < amount + 1000  # the loss, counts of tokens
    assert (made.parameters, made.optimizer) == (size, 2 * size + 4)


def test_a_product_for_which_xla_has_no_tiles_goes_to_cublas():
    """float32 products into 72 columns, as of one head of 24: XLA refuses them where it cannot time any."""
    config = run_config("across", d_model=384, n_head=16, n_layer=1)
    config = dataclasses.replace(config, engine=EngineConfig(dtype="float32"), mesh=MeshConfig(1, 1, 16))
    assert compiled_step(on_gpus(config), Cluster("h200", 4, 4)).flops > 0
