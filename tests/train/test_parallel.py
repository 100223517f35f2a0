"""Training over eight virtual CPU devices equals training on one, and sends what it must; see parallel_program.py."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from parallel_program import CASES, SMALL, STEPS, B, T

from andrea_jax.inspect.hlo_text import executed, parse
from andrea_jax.parameters import count_parameters, named_specs

ULP = 2.0**-23
# Eight devices; and code that is compiled fast rather than runs fast, which is the same HLO.
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
SPLIT = [name for name, case in CASES.items() if case.mesh != (1, 1, 1)]
JIT = [name for name in SPLIT if CASES[name].train.get("parallel") != "pmap"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Folder of what the program wrote, and its standard error."""
    folder = tmp_path_factory.mktemp("parallel")
    tests = Path(__file__).parents[1]
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, str(tests / "parallel_program.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def results(program, name):
    with np.load(program[0] / f"{name}.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", SPLIT)
def test_every_metric_of_every_step_equals_that_of_one_device(program, name):
    one, split = (results(program, n) for n in (name.split("_")[0], name))
    for metric in ("loss", "nll", "grad_norm", "param_norm", "tokens", "learning_rate", "finite"):
        # Means and norms of thousands of numbers, each the sum over other parts: a few roundings of the result.
        np.testing.assert_allclose(split[metric], one[metric], rtol=12 * ULP, err_msg=metric)
    assert one["loss"][-1] < 0.75 * one["loss"][0]  # something was learned that could differ


@pytest.mark.parametrize("name", SPLIT)
def test_parameters_after_twenty_steps_are_off_by_a_rounding_a_step(program, name):
    """A device that starts from parameters rounded otherwise says what one rounding becomes."""
    reference = name.split("_")[0]
    one, nudged, split = (results(program, n) for n in (reference, f"{reference}_nudged", name))
    for tensor in (key for key in one if key.startswith("params.")):
        rounding = np.abs(nudged[tensor] - one[tensor]).max()
        assert np.abs(split[tensor] - one[tensor]).max() <= STEPS * rounding, tensor


@pytest.mark.parametrize("name", SPLIT)
def test_the_evaluation_equals_that_of_one_device(program, name):
    one, split = (results(program, n) for n in (name.split("_")[0], name))
    for measure in ("loss", "perplexity", "bits_per_byte"):
        np.testing.assert_allclose(split[f"evaluation.{measure}"], one[f"evaluation.{measure}"], rtol=12 * ULP)
    for measure in ("tokens", "bytes"):
        assert split[f"evaluation.{measure}"] == one[f"evaluation.{measure}"] > 0


class Sent(NamedTuple):
    """What one collective gives on one device: its kind, and the shape of each array."""

    kind: str
    shapes: list[tuple[int, ...]]


def collectives(program, name):
    """The collectives of a compiled step, as often as they run."""
    computations, entry = parse((program[0] / f"{name}.hlo").read_text())
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return [
        Sent(i.opcode, [shape for _, shape in i.arrays])
        for _, i, times in executed(computations, entry)
        for _ in range(times)
        if i.opcode in kinds
    ]


def of_kind(sent, kind):
    return [shape for s in sent if s.kind == kind for shape in s.shapes]


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def test_data_parallel_steps_reduce_all_gradients_at_once_and_nothing_else(program):
    sent = collectives(program, "tied_data_8")
    assert {s.kind for s in sent} == {"all-reduce"}
    assert len(sent) == 2  # gradients and the loss; before them the batch's weight
    table = SMALL.padded_vocab_size * SMALL.d_model  # used as table and as head: two gradients, added afterwards
    scalars = 4  # of loss, nll, and twice the batch's weight
    assert elements(of_kind(sent, "all-reduce")) == count_parameters(SMALL) + table + scalars


def test_fsdp_steps_gather_each_matrix_where_it_is_used_and_nothing_else(program):
    sent = collectives(program, "tied_fsdp_8")
    assert {s.kind for s in sent} == {"all-gather", "all-reduce"}  # XLA scatters what it reduces on GPUs only
    gathered = [math.prod(shape) for shape in of_kind(sent, "all-gather")]
    block = [math.prod(spec.shape[1:]) for spec in named_specs(SMALL).values() if spec.matrix]
    tables = {SMALL.padded_vocab_size * SMALL.d_model, T * SMALL.d_model}
    assert {size for size in gathered if size in tables} == tables
    # forward, and recomputed for the backward pass, as `remat` says
    assert sorted(size for size in gathered if size not in tables) == sorted(2 * SMALL.n_layer * block)


@pytest.mark.parametrize(("name", "rows"), [("tied_tensor_4", B), ("tied_2x2x2", B // 4)])
def test_tensor_parallel_steps_reduce_activations_as_often_as_megatron_does(program, name, rows):
    """Four times a layer: the sums over heads and over the MLP's width forward, and backward those into the two norms.

    Once more for the table, whose rows lie on several devices, and for the gradient that comes from the vocabulary.
    """
    sent = collectives(program, name)
    stream = [shape for shape in of_kind(sent, "all-reduce") if shape == (rows, T, SMALL.d_model)]
    assert len(stream) == 4 * SMALL.n_layer + 1
    from_head = [s for s in of_kind(sent, "all-reduce") if len(s) == 2 and s[0] % 5 == 0 and s[1] == SMALL.d_model]
    assert elements(s for s in from_head if s[0] != T) == rows * T * SMALL.d_model


@pytest.mark.parametrize("name", JIT)
def test_no_activation_is_ever_gathered_or_exchanged(program, name):
    """Muon multiplies and transposes whole matrices, which XLA does its own way; T divides no matrix."""
    sent = [s for s in collectives(program, name) if s.kind != "all-reduce"]
    activations = [shape for s in sent for shape in s.shapes if any(size % T == 0 for size in shape)]
    assert set(activations) <= {(T, SMALL.d_model)}  # the position table


def test_no_sharding_makes_xla_copy_an_array_to_every_device(program):
    assert "rematerialization" not in program[1]
