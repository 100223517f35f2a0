"""The training step compiled for several H200s: what it sends between them, and that it computes meanwhile."""

import contextlib
import dataclasses
import functools
import math
import os
import sys
import tempfile
from typing import NamedTuple

import pytest

from andrea_jax import EngineConfig, ModelConfig
from andrea_jax.inspect.compiled_step import Cluster, compiled_step
from andrea_jax.inspect.hlo_text import Computation, Instruction, executed, parse
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import count_parameters, named_specs
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig

pytestmark = pytest.mark.aot
B, T = 16, 160
MODEL = ModelConfig(vocab_size=8449, vocab_multiple=128, d_model=256, n_layer=2, n_head=4, context_length=T)
D, V, N, H = MODEL.d_model, MODEL.padded_vocab_size, MODEL.n_head, MODEL.head_dim
BLOCK = [math.prod(spec.shape[1:]) for spec in named_specs(MODEL).values() if spec.matrix]  # numbers in its matrices
VECTORS = count_parameters(MODEL) - MODEL.n_layer * sum(BLOCK) - (V + T) * D
LAYOUTS = [(8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2)]


class Sent(NamedTuple):
    """A collective: its kind, dtype and shape of what it gives on one device, and how many kernels run meanwhile."""

    kind: str
    arrays: list[tuple[str, tuple[int, ...]]]
    meanwhile: int

    @property
    def numbers(self):
        return sum(math.prod(shape) for _, shape in self.arrays)


@functools.cache
def compiled(mesh, n_layer=MODEL.n_layer, kind="adamw"):
    """The HLO of a step, and what the compiler said."""
    config = RunConfig(
        model=dataclasses.replace(MODEL, n_layer=n_layer),
        train=TrainConfig(batch_size=B),
        optimizer=OptimizerConfig(kind),
        engine=EngineConfig(dtype="bfloat16", attention="cudnn"),
        mesh=MeshConfig(*mesh),
    )
    with said() as words:
        step = compiled_step(config, Cluster("h200", 1, math.prod(mesh)))
    return step.text, words[0]


@contextlib.contextmanager
def said():
    """A list, in the end with what was written to standard error, also by XLA."""
    words, kept = [], os.dup(2)
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield words
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            words.append(file.read().decode())


def collectives(*args, **options):
    """All collectives of a step, as often as they run; each must be asynchronous."""
    computations, entry = parse(compiled(*args, **options)[0])
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    sent = []
    for computation, i, times in executed(computations, entry):
        assert i.opcode not in kinds
        if i.opcode.removesuffix("-start") in kinds:
            sent += [_sent(computation, i)] * times
    return sent


def _sent(computation: Computation, start: Instruction) -> Sent:
    """The text is in the order of execution: what stands between start and done runs meanwhile."""
    order = list(computation.instructions.values())
    (done,) = (i for i in computation.users(start.name) if i.opcode.endswith("-done"))
    between = order[order.index(start) + 1 : order.index(done)]
    meanwhile = sum(i.opcode in ("fusion", "custom-call", "while") for i in between)
    return Sent(start.opcode.removesuffix("-start"), done.arrays, meanwhile)


def of_kind(sent, kind):
    return [array for s in sent if s.kind == kind for array in s.arrays]


def numbers(arrays):
    return [math.prod(shape) for _, shape in arrays]


def test_data_parallel_steps_reduce_each_gradient_once_whatever_the_depth():
    sent, deeper = collectives((8, 1, 1)), collectives((8, 1, 1), n_layer=4)
    assert {s.kind for s in sent} == {"all-reduce"}
    assert len(sent) == len(deeper) == 3  # in the activations' dtype, in float32, and the scalars
    parameters = sum(s.numbers for s in sent if s.numbers > 2)
    assert (
        count_parameters(MODEL) <= parameters <= count_parameters(MODEL) + 2
    )  # loss and nll; a tied table is added before
    in_bfloat16 = numbers(a for a in of_kind(sent, "all-reduce") if a[0] == "bf16")
    assert sum(in_bfloat16) == MODEL.n_layer * (sum(BLOCK) + D)  # the matrices of blocks, and b_2


def test_fsdp_steps_gather_each_matrix_once_and_scatter_each_gradient():
    sent = collectives((1, 8, 1))
    gathered = of_kind(sent, "all-gather")
    assert sorted(numbers(a for a in gathered if a[0] == "bf16")) == sorted([*BLOCK * MODEL.n_layer, V * D])
    assert sorted(numbers(a for a in gathered if a[0] == "f32")) == sorted([V * D, T * D])  # looked up in float32
    scattered = of_kind(sent, "reduce-scatter")  # on a device an eighth of each; that of a tied table's two uses
    assert sorted(numbers(scattered)) == sorted(n // 8 for n in [*BLOCK * MODEL.n_layer, V * D, V * D, T * D])
    reduced = sum(s.numbers for s in sent if s.kind == "all-reduce")
    assert VECTORS <= reduced < VECTORS + D // 2  # gains, shifts and biases; loss, weight, and parts of the norms


@pytest.mark.parametrize(("mesh", "rows"), [((1, 1, 4), B), ((2, 2, 2), B // 4)])
def test_tensor_parallel_steps_reduce_activations_as_often_as_megatron_does(mesh, rows):
    """Four times a layer (after `out` and `w_2`; backward before the two norms) in bfloat16, and in float32 once: the
    table's rows lie on several devices. The gradient that comes from the vocabulary is that of one chunk here."""
    reduced = of_kind(collectives(mesh), "all-reduce")
    assert reduced.count(("bf16", (rows, T, D))) == 4 * MODEL.n_layer
    assert reduced.count(("f32", (rows, T, D))) == 1
    from_head = [shape for _, shape in reduced if shape[1:] == (D,) and shape[0] % rows == 0]
    assert sum(map(math.prod, from_head)) == rows * T * D


def test_all_axes_together_gather_weights_scatter_over_fsdp_and_then_reduce_the_rest_over_data():
    sent = collectives((2, 2, 2))
    matrices = [n // 2 for n in BLOCK * MODEL.n_layer]  # on one of two devices of `tensor`
    table, positions = V * D // 2, T * D
    assert sorted(numbers(of_kind(sent, "all-gather"))) == sorted([*matrices, table, table, positions])
    assert sorted(numbers(of_kind(sent, "reduce-scatter"))) == sorted(n // 2 for n in [*matrices, table, table])
    reduced = of_kind(sent, "all-reduce")
    assert (
        sum(n for n in numbers(a for a in reduced if a[0] == "bf16" and len(a[1]) == 1)) == sum(matrices) // 2 + 2 * D
    )
    assert ("f32", (V // 2, D // 2)) in reduced


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_no_activation_is_gathered_and_none_is_exchanged(mesh):
    sent = collectives(mesh)
    assert {s.kind for s in sent} <= {"all-reduce", "all-gather", "reduce-scatter"}
    allowed = {n // split for n in [*BLOCK, V * D, T * D] for split in (1, mesh[2])}
    local = B * T // (mesh[0] * mesh[1])
    assert not allowed & {rows * n for rows in (local, B * T) for n in (D, 3 * D, 4 * D, V, V // mesh[2])}
    assert set(numbers(of_kind(sent, "all-gather"))) <= allowed


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_attention_in_cudnn_is_of_each_devices_rows_and_heads(mesh):
    text, _ = compiled(mesh)
    local = f"bf16[{B // (mesh[0] * mesh[1])},{N // mesh[2]},{T},{H}]"
    calls = [line for line in text.splitlines() if 'custom_call_target="__cudnn$fmhaSoftmax' in line]
    assert len(calls) == 2 * MODEL.n_layer
    assert all(f" = ({local}" in line for line in calls)


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_xla_finds_a_way_between_all_shardings(mesh):
    assert "rematerialization" not in compiled(mesh)[1]


def test_gradients_travel_while_the_backward_pass_goes_on():
    for mesh, kind in [((8, 1, 1), "all-reduce"), ((1, 8, 1), "reduce-scatter"), ((2, 2, 2), "reduce-scatter")]:
        large = [s for s in collectives(mesh) if s.kind == kind and s.numbers > 10_000]
        assert large
        assert all(s.meanwhile > 0 for s in large), mesh


def test_muon_in_data_parallel_steps_sends_what_adamw_sends():
    adamw, muon = collectives((8, 1, 1)), collectives((8, 1, 1), kind="muon")
    assert sorted(s.numbers for s in adamw) == sorted(s.numbers for s in muon)
