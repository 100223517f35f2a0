"""The Triton kernels as jax-triton hands them to named GPUs: registers, spills, wide accesses, bytes moved."""

import importlib
import importlib.util
import re
import subprocess
import sys
import zlib
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.gpu import registers_and_spills
from aot.test_kernels_norm_gelu import gelu_arguments, moved, norm_arguments, norm_gradients, ours
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from andrea_jax import UserError
from andrea_jax.inspect.compile_for import TARGETS
from pallas_kernels import bias_gelu, dispatch, residual_norm

MISSING = [name for name in ("triton", "jax_triton") if not importlib.util.find_spec(name)]
pytestmark = [pytest.mark.aot, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")]
CARDS = {"h200": "9.0", "a100": "8.0", "rtx4090": "8.9", "rtx3060": "8.6"}
HIDDEN = 2  # parameters that Triton adds to a kernel, both null: as many as jaxlib appends when it launches


@pytest.fixture
def take_for(monkeypatch):
    """take_for(card): this process takes itself for one that has the card."""

    def pretend(card):
        jax.clear_caches()
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=CARDS[card])])

    return pretend


def gelu_gradients(u, dy, bias):
    return jax.vjp(partial(bias_gelu, implementation="jax_triton"), u, bias)[1](dy)


def gelu_backward(u, dy, bias):
    """Alone: vjp would add the bias once more."""
    return importlib.import_module("pallas_kernels.bias_gelu_triton").backward(u, dy, bias)


def custom_calls(operation):
    """The custom calls in a lowered module, in loops and functions too."""
    if operation.name == "stablehlo.custom_call":
        yield operation
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from custom_calls(inner.operation)


def handed_over(f, *arguments):
    """What jax-triton passes to XLA for each kernel of f: PTX, parameters and grid, with Triton's own code."""
    lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))
    for call in custom_calls(lowered.compiler_ir("stablehlo").operation):
        typed = "mhlo.backend_config" in call.attributes  # since jax-triton 0.4
        config = call.attributes["mhlo.backend_config"]["opaque"] if typed else call.attributes["backend_config"]
        yield zlib.decompress(config.value_bytes).decode(errors="replace")


def ptx(handed):
    """The PTX among it, which Triton's code follows."""
    start = handed.index(".version")
    return handed[start : handed.rindex("}", start, handed.index("#loc", start)) + 1]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("f", "arguments", "arrays", "most_registers"),
    [
        (norm_gradients("jax_triton", stream=True), norm_arguments(768), 6, 72),
        (norm_gradients("jax_triton", stream=True, kind="rms"), norm_arguments(1000, jnp.float16), 6, 72),
        (norm_gradients("jax_triton", stream=True), norm_arguments(1536, jnp.float32), 6, 80),
        (gelu_gradients, gelu_arguments(3072), 4, 64),
        (gelu_gradients, gelu_arguments(6144, jnp.float32), 4, 80),
    ],
)
def test_no_spills_no_atomics_and_16_bytes_an_access(card, f, arguments, arrays, most_registers, take_for):
    take_for(card)
    (text,) = map(ptx, handed_over(f, *arguments))
    assert re.search(r"\.target (\w+?)a?\b", text).group(1) == "sm_" + CARDS[card].replace(".", "")
    ((registers, spilled),) = registers_and_spills(text).values()
    assert spilled == 0
    assert registers <= most_registers
    assert len(re.findall(r"\.param \.", text)) == arrays + HIDDEN
    accesses = ours(text)
    assert {kind for kind, _ in accesses} == {"ld", "st"}
    assert {width for _, width in accesses} == {"v4.b32"}
    assert len(accesses) == len(re.findall(r"\b(?:ld|st)\.global", text))
    assert not re.search(r"\b(?:atom|red)\.", text)


@pytest.mark.parametrize("card", ["h200", "rtx3060"])
def test_the_widest_norm_that_is_supported_does_not_spill(card, take_for):
    take_for(card)
    D = dispatch.MAX_WIDTH["residual_norm"]
    (text,) = map(ptx, handed_over(norm_gradients("jax_triton", stream=True), *norm_arguments(D, jnp.float32)))
    assert [spilled for _, spilled in registers_and_spills(text).values()] == [0]


@pytest.mark.parametrize("card", CARDS)
def test_what_the_interpreter_cannot_show_nan_passes_the_clamp_and_bfloat16_is_rounded(card, take_for):
    take_for(card)
    (text,) = map(ptx, handed_over(gelu_gradients, *gelu_arguments(3072)))
    clamps = re.findall(r"\b(?:max|min)\.[\w.]+", text)
    assert clamps
    assert all(".NaN" in clamp for clamp in clamps)
    assert "cvt.rn.bf16" in text


@pytest.mark.parametrize(
    ("f", "arguments", "at_most"),
    [
        (norm_gradients("jax_triton", stream=False), norm_arguments(768), 3.1),
        (norm_gradients("jax_triton", stream=True), norm_arguments(1024), 4.15),
        (norm_gradients("jax_triton", stream=False, kind="rms"), norm_arguments(768), 3.1),
        (gelu_backward, gelu_arguments(3072), 3.05),
    ],
)
def test_a_backward_pass_is_one_kernel_that_reads_each_array_once(f, arguments, at_most, take_for):
    take_for("h200")
    kernels, units = moved(f, arguments)
    assert units <= at_most
    (ours,) = [kernel for kernel in kernels if kernel.kind == "pallas"]
    assert all(kernel.bytes < 0.03 * ours.bytes for kernel in kernels if kernel is not ours)


@pytest.mark.parametrize(("rows", "wide"), [(2**20, False), (2**22, True)])
def test_arrays_of_2_to_the_31_numbers_are_indexed_with_64_bits(rows, wide, take_for):
    take_for("h200")
    x, vector = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.float32)
    for f, arguments in (
        (norm_gradients("jax_triton", stream=False), (x, vector, vector, x, x)),
        (gelu_gradients, (x, x, vector)),
    ):
        (handed,) = handed_over(f, *arguments)
        offsets = re.findall(r"tt\.addptr .*, tensor<\w+x(i\d+)>", handed)
        assert offsets
        assert ("i64" in offsets) == wide


def test_vmap_is_a_loop_over_one_kernel(take_for):
    take_for("a100")
    x, gain = jax.ShapeDtypeStruct((5, 64, 96), jnp.bfloat16), jax.ShapeDtypeStruct((5, 96), jnp.float32)
    f = jax.vmap(norm_gradients("jax_triton", stream=True))
    (text,) = map(ptx, handed_over(f, x, gain, gain, x, x))
    assert "residual_norm_backward" in text
    assert [result.shape for result in jax.tree.leaves(jax.eval_shape(f, x, gain, gain, x, x))] == [
        x.shape,
        (5, 96),
        (5, 96),
    ]


def test_the_forward_pass_is_xlas(take_for):
    take_for("h200")
    x = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    norm = partial(residual_norm, eps=1e-5, implementation="jax_triton")
    assert not list(handed_over(lambda x: norm(x, x, None, None), x))
    assert not list(handed_over(partial(bias_gelu, bias=None, implementation="jax_triton"), x))


def test_second_derivatives_are_refused(take_for):
    take_for("h200")
    slope = jax.grad(lambda h: bias_gelu(h, None, "jax_triton").sum())
    with pytest.raises(UserError, match="first derivatives only; use implementation='xla'"):
        jax.eval_shape(jax.grad(lambda h: slope(h).sum()), jax.ShapeDtypeStruct((4, 8), jnp.float32))


def test_rows_on_two_devices_stay_there(take_for):
    text = (TARGETS / "h200.txtpb").read_text()
    devices = topologies.get_topology_desc("", "cuda", topology="1x1x2", target_config=text).devices
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("data", None)), NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8192, 768), jnp.bfloat16, sharding=rows)
    gain = jax.ShapeDtypeStruct((768,), jnp.float32, sharding=whole)
    take_for("h200")

    def loss(x, gain):
        _, normed = residual_norm(x, None, gain, gain, 1e-5, "layer", "jax_triton", rows)
        return bias_gelu(normed, gain, "jax_triton", rows).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, gain).compile().as_text()
    assert len(re.findall(r'custom_call_target="triton_kernel_call', compiled)) == 2
    assert "all-gather" not in compiled


def test_it_needs_no_triton_back_end_of_pallas():
    program = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
from types import SimpleNamespace
import jax, jax.numpy as jnp
from pallas_kernels import bias_gelu, dispatch, residual_norm
jax.default_backend = lambda: "gpu"
jax.devices = lambda: [SimpleNamespace(compute_capability="9.0")]
norm = lambda x: residual_norm(x, x, None, None, 1e-5, "layer", "jax_triton")[1]
loss = lambda x: bias_gelu(norm(x), None, "jax_triton").sum()
print(dispatch.support("bias_gelu", (4, 8), "float32"))
print(jax.jit(jax.grad(loss)).trace(jnp.ones((4, 8))).lower(lowering_platforms=("cuda",)).as_text())
"""
    root = dispatch.__file__.removesuffix("pallas_kernels/dispatch.py")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert "has no Triton back end for Pallas" in printed.stdout
    assert len(re.findall(r"custom_call @triton_kernel_call", printed.stdout)) == 2
