import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from andrea_jax import UserError
from pallas_kernels import bias_gelu, dispatch, launch, residual_norm, triton_launch
from pallas_kernels.dispatch import Plan, plan, support

OPERATIONS = ("residual_norm", "bias_gelu")
SHAPE = (64, 768)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "the platform is cpu"),
        ({"platform": "tpu"}, "the platform is tpu"),
        ({"capability": "7.5"}, "compute capability is 7.5"),
        ({"capability": "gfx942"}, "compute capability is gfx942"),
        ({"dtype": "float64"}, "the dtype is float64"),
        ({"dtype": "int8"}, "the dtype is int8"),
        ({"shape": (64, 8193)}, "a row of 8193 numbers does not fit"),
        ({"shape": (2**15, 2**16, 8)}, "2147483648 rows are more"),
        ({"implementation": "jax_triton", "operation": "gates"}, "no jax-triton kernel is written for gates"),
    ],
)
def test_each_reason_is_given(change, reason):
    can = {"operation": "residual_norm", "shape": SHAPE, "dtype": "bfloat16", "platform": "gpu", "capability": "8.6"}
    assert support(**can) == []
    (given,) = support(**can | change)
    assert reason in given


def test_all_reasons_are_given_together(monkeypatch):
    monkeypatch.setattr(launch, "pltriton", None)
    with pytest.raises(UserError, match=r"no Triton back end.*platform is tpu.*dtype is float64.*row of 9000"):
        plan("residual_norm", (3, 9000), "float64", "pallas", sums=True, platform="tpu")


def test_on_a_cpu_auto_is_xla_and_pallas_is_interpreted():
    for operation in OPERATIONS:
        assert plan(operation, SHAPE, "float32", "auto", sums=True) == dispatch.XLA
        assert plan(operation, SHAPE, "float32", "pallas", sums=True) == Plan(True, True, True)


def test_on_a_gpu_auto_runs_the_backward_kernels_that_sum_parameter_gradients():
    gpu = {"platform": "gpu", "capability": "9.0"}
    for operation in OPERATIONS:
        assert plan(operation, SHAPE, "bfloat16", "auto", sums=True, **gpu) == Plan(False, True, False)
        assert plan(operation, SHAPE, "bfloat16", "auto", sums=False, **gpu) == dispatch.XLA
        assert plan(operation, SHAPE, "float64", "auto", sums=True, **gpu) == dispatch.XLA
        assert plan(operation, (0, 768), "bfloat16", "pallas", sums=True, **gpu) == dispatch.XLA


def test_jax_triton_runs_the_backward_pass_as_a_kernel_and_auto_does_not_choose_it(monkeypatch):
    monkeypatch.setattr(triton_launch, "obstacles", lambda capability: [])
    gpu = {"platform": "gpu", "capability": "9.0"}
    for operation in OPERATIONS:
        assert plan(operation, SHAPE, "bfloat16", "jax_triton", **gpu) == Plan(False, True, False, triton=True)
        assert not plan(operation, SHAPE, "bfloat16", "auto", **gpu).triton
        assert plan(operation, (0, 768), "bfloat16", "jax_triton", **gpu) == dispatch.XLA


def test_jax_triton_is_refused_on_a_cpu():
    with pytest.raises(UserError, match=r"implementation = 'jax_triton' cannot run: .*the platform is cpu"):
        bias_gelu(jnp.ones((2, 4)), None, "jax_triton")


@pytest.mark.parametrize("package", ["jax_triton", "triton"])
def test_jax_triton_without_its_packages_says_what_to_install(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    monkeypatch.setitem(sys.modules, package, None)
    (reason,) = support("bias_gelu", SHAPE, "bfloat16", "jax_triton", "gpu", "8.0")
    assert package in reason
    assert "pip install 'andrea_jax[cuda12]'" in reason


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [("3.8.0", "9.0", None), ("3.9.0", "9.0", "3.8"), ("3.9.0", "8.9", None), ("3.7.1", "12.0", "3.6")],
)
def test_a_triton_whose_ptx_jax_may_not_read_is_refused_where_it_cannot_be_told(
    version, capability, refused, monkeypatch
):
    def triton_call(**options):
        raise AssertionError

    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    for newer in (False, True):
        call = triton_call if not newer else lambda backend_options: None
        monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(__version__="0.3.1", triton_call=call))
        reasons = support("bias_gelu", SHAPE, "bfloat16", "jax_triton", "gpu", capability)
        assert bool(reasons) == (refused is not None and not newer)
        assert all(f"pip install 'triton=={refused}.*'" in reason for reason in reasons)


def test_auto_says_once_what_it_chose_and_why(caplog):
    dispatch._say.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            residual_norm(jnp.ones(SHAPE), None, None, None, 1e-5)
            plan("bias_gelu", SHAPE, "bfloat16", "auto", sums=True, platform="gpu", capability="8.0")
    norm, gelu = caplog.messages
    assert norm == "residual_norm: xla, because the platform is cpu, not an NVIDIA GPU"
    assert "backward pallas (3.0U as XLA's best" in gelu


def test_a_gpu_that_jax_refuses_is_a_reason(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("Card", (), {"compute_capability": "8.6"})])
    monkeypatch.setattr(launch, "refusal", lambda: "NotImplementedError: RTX 3060")
    assert support("bias_gelu", SHAPE, "bfloat16") == [
        f"jax {jax.__version__} refuses this GPU: NotImplementedError: RTX 3060"
    ]
    monkeypatch.setattr(launch, "refusal", lambda: None)
    assert support("bias_gelu", SHAPE, "bfloat16") == []


def test_the_probe_reports_what_lowering_raises():
    assert "Only interpret mode is supported on CPU" in launch.refusal.__wrapped__()


@pytest.mark.parametrize("implementation", ["triton", "Pallas", ""])
def test_an_unknown_implementation_is_refused(implementation):
    with pytest.raises(UserError, match="expected one of auto, xla, pallas, jax_triton"):
        bias_gelu(jnp.ones(4), None, implementation)


def test_what_auto_chose_for_a_gpu_still_runs_where_it_is_lowered_for_a_cpu():
    gpu_plan = Plan(False, True, False)

    def pallas(x, interpret=False):
        assert not interpret
        return 2 * x

    run = jax.jit(lambda x: dispatch.run("bias_gelu", True, gpu_plan, pallas, lambda x: 3 * x, x))
    assert run(1.0) == 3
    cuda = run.trace(1.0).lower(lowering_platforms=("cuda",)).as_text()
    assert "2.0" in cuda
    assert "3.0" not in cuda


def test_a_jax_without_the_triton_back_end_still_computes():
    program = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp
from pallas_kernels import dispatch, residual_norm
x = jnp.float32([[3, 4]])
print(residual_norm(x, None, jnp.ones(2), None, 0.0, "rms")[1])
print(dispatch.support("residual_norm", (1, 2), "float32", platform="gpu", capability="9.0"))
"""
    root = dispatch.__file__.removesuffix("pallas_kernels/dispatch.py")
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    ).stdout
    assert "0.848" in printed
    assert "has no Triton back end for Pallas" in printed


def test_the_table_is_the_matrix(monkeypatch):
    monkeypatch.setattr(triton_launch, "obstacles", lambda capability: [])
    table = dispatch.table()
    for operation, place, dtype, kernels, answer in dispatch.matrix():
        line = next(
            line
            for line in table.splitlines()
            if line.split(maxsplit=1)[0] == operation and place in line and dtype in line
        )
        assert line.endswith(answer)
        assert f" {kernels} " in line
        can = place in ("gpu 8.0", "gpu 8.6", "gpu 8.9", "gpu 9.0") and dtype != "float64"
        assert answer.startswith("forward ") == can
        assert ("pallas" in kernels) == can
        assert ("jax_triton" in kernels) == (can and operation in OPERATIONS)
        assert (answer == "forward xla, backward pallas") == (can and operation in OPERATIONS)
    here = [line.split()[:4] for line in table.splitlines() if " here " in line]
    assert here == [
        [name, "here", "bfloat16", form] for name in dispatch.MAX_WIDTH for form in ("pallas", "jax_triton")
    ]
