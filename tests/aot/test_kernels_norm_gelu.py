"""The norm and GELU kernels compiled for named GPUs: registers, spills, wide accesses, launches and bytes moved."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from aot.gpu import assembly, compile_for, registers_and_spills
from bench.hlo_kernels import bytes_of, total

from pallas_kernels import bias_gelu_kernel, bias_gelu_xla, dispatch, residual_norm, residual_norm_kernel

pytestmark = pytest.mark.aot
S = jax.ShapeDtypeStruct
ROWS = 65536


def norm_gradients(implementation, stream, kind="layer"):
    """The backward pass from the stream, with or without a cotangent of its own, through the public function."""

    def gradients(x, gain, shift, dstream, dy):
        norm = functools.partial(residual_norm, eps=1e-5, kind=kind, implementation=implementation)
        select = (lambda outputs: outputs) if stream else (lambda outputs: outputs[1])
        _, vjp = jax.vjp(lambda x, gain, shift: select(norm(x, None, gain, shift)), x, gain, shift)
        return vjp(select((dstream, dy)))

    return gradients


def norm_arguments(D, dtype=jnp.bfloat16):
    x, vector = S((ROWS, D), dtype), S((D,), jnp.float32)
    return x, vector, vector, x, x


def gelu_arguments(F, dtype=jnp.bfloat16):
    return S((ROWS, F), dtype), S((ROWS, F), dtype), S((F,), jnp.float32)


def moved(f, arguments):
    """The kernels of f compiled for an H200, and what they move in units of its first argument."""
    kernels = bytes_of(compile_for("h200", f, *arguments))
    unit = arguments[0].size * arguments[0].dtype.itemsize
    return kernels, total(kernels) / unit


@pytest.mark.parametrize("D", [768, 1024])
@pytest.mark.parametrize(("stream", "at_most"), [(False, 3.1), (True, 4.15)])
def test_norm_backward_is_one_kernel_that_reads_each_array_once(D, stream, at_most):
    kernels, units = moved(norm_gradients("pallas", stream), norm_arguments(D))
    assert units <= at_most
    (ours,) = [kernel for kernel in kernels if kernel.kind == "pallas"]
    assert all(kernel.bytes < 0.03 * ours.bytes for kernel in kernels if kernel is not ours)  # the sums of partials
    assert len(kernels) <= 3


@pytest.mark.parametrize("F", [3072, 4096])
def test_gelu_backward_is_one_kernel_that_reads_each_array_once(F):
    kernels, units = moved(bias_gelu_kernel.backward, gelu_arguments(F))
    assert units <= 3.05
    (ours,) = [kernel for kernel in kernels if kernel.kind == "pallas"]
    assert all(kernel.bytes < 0.01 * ours.bytes for kernel in kernels if kernel is not ours)
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("f", "arguments", "expected"),
    [
        (norm_gradients("xla", stream=False), norm_arguments(768), 5.1),
        (norm_gradients("xla", stream=True), norm_arguments(768), 6.1),
        (norm_gradients("xla", stream=False, kind="rms"), norm_arguments(768), 5.1),
        (bias_gelu_xla.backward, gelu_arguments(3072), 3.0),
        (bias_gelu_xla.backward, gelu_arguments(3072, jnp.float16), 7.0),
    ],
)
def test_the_xla_forms_move_what_the_table_of_auto_says(f, arguments, expected):
    assert moved(f, arguments)[1] == pytest.approx(expected, abs=0.05)


def ours(ptx):
    """The accesses to GPU memory in a kernel's PTX, as (ld or st, width)."""
    return re.findall(r"\b(ld|st)\.global(?:\.[a-z]\w*(?:::\w+)*)*?\.((?:v\d\.)?b\d+)", ptx)


@pytest.mark.parametrize("card", ["h200", "a100", "rtx4090", "rtx3060"])
@pytest.mark.parametrize(
    ("f", "arguments", "most_registers"),
    [
        (norm_gradients("pallas", stream=True), norm_arguments(768), 64),
        (norm_gradients("pallas", stream=True, kind="rms"), norm_arguments(1000, jnp.float16), 64),
        (norm_gradients("pallas", stream=True), norm_arguments(1536, jnp.float32), 80),
        (bias_gelu_kernel.backward, gelu_arguments(3072), 64),
        (bias_gelu_kernel.backward, gelu_arguments(6144, jnp.float32), 64),
    ],
)
def test_no_spills_and_16_bytes_an_access(card, f, arguments, most_registers):
    (ptx,) = [text for text in assembly(card, f, *arguments) if "_backward" in text]
    ((registers, spilled),) = registers_and_spills(ptx).values()
    assert spilled == 0
    assert registers <= most_registers
    accesses = ours(ptx)
    assert {kind for kind, _ in accesses} == {"ld", "st"}
    assert {width for _, width in accesses} == {"v4.b32"}
    assert len(accesses) == len(re.findall(r"\b(?:ld|st)\.global", ptx))


@pytest.mark.parametrize("card", ["h200", "rtx3060"])
def test_the_widest_norm_that_is_supported_does_not_spill(card):
    D = dispatch.MAX_WIDTH["residual_norm"]
    x, vector = S((1024, D), jnp.float32), S((D,), jnp.float32)
    backward = functools.partial(residual_norm_kernel.backward, eps=1e-5, kind="layer")
    (ptx,) = [text for text in assembly(card, backward, x, x, x, vector, vector) if "_backward" in text]
    assert [spilled for _, spilled in registers_and_spills(ptx).values()] == [0]
