"""Lowering for CUDA with the CPU wheel: catches what Pallas' interpreter allows and its Triton back end does not."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import bias_gelu, residual_norm

S = jax.ShapeDtypeStruct
H200 = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"))
NORM = ["residual_norm_forward", "residual_norm_backward"]
GELU = ["bias_gelu_forward", "bias_gelu_backward"]
norm = functools.partial(residual_norm, eps=1e-5, implementation="pallas")


def kernels(f, *args):
    """Names of the Triton kernels in f and its gradient lowered for CUDA, in order."""

    def passes(args, cotangent):
        outputs, vjp = jax.vjp(f, *args)
        return outputs, vjp(cotangent)

    with use_abstract_mesh(H200):  # jax 0.11 and later want to know the card
        lowered = jax.jit(passes).trace(args, jax.eval_shape(f, *args)).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "xla.gpu.triton" in line]
    return [name for call in calls for name in NORM + GELU if f'"{name}"' in call]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("N", "D", "kind"), [(1, 8, "rms"), (37, 768, "layer"), (257, 1000, "layer"), (3, 1, "rms")])
def test_residual_norm_is_one_kernel_each_way(N, D, kind, dtype):
    x, gain = S((N, D), dtype), S((D,), jnp.float32)
    assert kernels(functools.partial(norm, kind=kind), x, x, gain, gain) == NORM


@pytest.mark.parametrize("present", [None, "delta", "gain", "shift"])
def test_residual_norm_with_absent_arguments(present):
    x, gain, shift = S((37, 96), jnp.bfloat16), S((96,), jnp.bfloat16), S((96,), jnp.float16)
    args = {"delta": x, "gain": gain, "shift": shift}
    assert kernels(norm, x, *(args[name] if name == present else None for name in args)) == NORM


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("N", "F"), [(1, 8), (257, 3072), (37, 1000), (3, 1)])
def test_bias_gelu_is_one_kernel_each_way(N, F, bias, dtype):
    gelu = functools.partial(bias_gelu, implementation="pallas")
    assert kernels(gelu, S((N, F), dtype), S((F,), jnp.float32) if bias else None) == GELU


@pytest.mark.parametrize("axes", [(0, None), (1, 0)])
def test_under_vmap(axes):
    x, gain = S((4, 4, 96), jnp.bfloat16), S((4, 96) if axes[1] == 0 else (96,), jnp.float32)
    assert kernels(jax.vmap(lambda x, gain: norm(x, x, gain, None), axes), x, gain) == NORM
