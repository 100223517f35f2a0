"""What the kernels move, in bytes compiled for an H200 at 65,536 rows, and what their programs hold in registers."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from aot.gpu import assembly, registers_and_spills
from bench.cases import Sizes
from bench.hlo_bytes import measure
from bench.hlo_kernels import total

from pallas_kernels import cross_entropy_kernel, gates_kernel

pytestmark = pytest.mark.aot


def units(name, width, form):
    kernels, unit, _ = measure("h200", name, Sizes(width=width), (form,))
    return total(kernels[form]) / unit


@pytest.mark.parametrize("width", [768, 1024])
@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("norm_backward", 3.1),
        ("rms_norm_backward", 3.1),
        ("stream_norm_backward", 4.15),
        ("add_norm_forward", 4.01),
        ("gelu_backward", 3.05),
        ("swiglu_forward", 3.01),
        ("swiglu_backward", 5.01),
        ("cross_entropy", 7.5),  # with float32 logits; 16-bit ones would leave 5
    ],
)
def test_kernels_move_little_more_than_they_must(name, width, at_most):
    assert units(name, width, "pallas") <= at_most


@pytest.mark.parametrize(
    ("name", "autodiff"), [("norm_backward", 9.0), ("stream_norm_backward", 10.0), ("gelu_backward", 7.0)]
)
def test_autodiff_moves_what_we_say_it_does(name, autodiff):
    assert units(name, 1024, "autodiff") == pytest.approx(autodiff, abs=0.05)


def test_gates_move_as_little_in_xla_as_in_a_kernel():
    for name in ("swiglu_forward", "swiglu_backward", "geglu_forward", "geglu_backward"):
        assert units(name, 768, "xla") == pytest.approx(units(name, 768, "pallas"), abs=0.01)


def test_a_step_moves_fewer_bytes_with_kernels_and_fewer_in_a_row_than_in_a_loop_over_layers():
    loop, row = (units(name, 768, "auto") for name in ("train_step", "train_step_unrolled"))
    plain = units("train_step_unrolled", 768, "xla")
    assert loop < 290
    assert row < 190
    assert row < 0.8 * plain


@pytest.mark.parametrize("card", ["h200", "a100", "rtx4090", "rtx3060"])
@pytest.mark.parametrize("V", [4353, 8576, 16384, 50304, 128256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cross_entropy_kernel_spills_nothing_and_moves_16_bytes_at_a_time(card, V, dtype):
    f = partial(cross_entropy_kernel.losses_and_gradient, vocab_size=V - 1, z_loss=1e-4, dtype=jnp.dtype(jnp.bfloat16))
    logits = jax.ShapeDtypeStruct((1024, V), dtype)
    labels, weights = jax.ShapeDtypeStruct((1024,), jnp.int32), jax.ShapeDtypeStruct((1024,), jnp.float32)
    (ptx,) = assembly(card, f, logits, labels, weights)
    ((registers, spilled),) = registers_and_spills(ptx).values()
    assert spilled == 0
    assert registers <= 128
    if V % 8 == 0:
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
        assert re.search(r"st\.global\S*\.v4\.b32", ptx)


@pytest.mark.parametrize("card", ["h200", "rtx3060"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_gate_kernels_spill_nothing_and_move_16_bytes_at_a_time(card, activation):
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    for f, arguments in ((gates_kernel.forward, (x, x)), (gates_kernel.backward, (x, x, x))):
        (ptx,) = assembly(card, partial(f, activation=activation), *arguments)
        ((registers, spilled),) = registers_and_spills(ptx).values()
        assert spilled == 0
        assert registers <= 64
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 2 * len(arguments)
