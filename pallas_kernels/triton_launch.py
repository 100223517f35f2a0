"""Calling a Triton kernel through jax-triton: what stands in the way, and what its versions do differently."""

from __future__ import annotations

import inspect
from typing import Any

import jax

PTX = 87  # CUDA 12.8's; left alone, Triton writes that of its own assembler, which jax's may be too old to read
# jax-triton before 0.4 cannot be told; the last Triton to write CUDA 12's, by the first number of the capability.
NEWEST_TRITON = {"9": (3, 8), "10": (3, 6), "11": (3, 6), "12": (3, 6)}


def call(
    kernel: Any, arguments: tuple[jax.Array, ...], outputs: Any, grid: tuple[int, ...], num_warps: int, **constants: Any
) -> Any:
    """The arrays like `outputs` that `kernel(*arguments, *outputs, **constants)` writes; vmap runs it in a loop.

    jax-triton compiles when JAX lowers and would ask the driver for the card, so it is told: then it also compiles on a
    machine without one (tests/aot/test_triton_compiled.py).
    """
    import jax_triton

    options = dict(num_warps=num_warps, num_stages=1, compute_capability=compute_capability(), **constants)
    parameters = inspect.signature(jax_triton.triton_call).parameters
    options["out_type" if "out_type" in parameters else "out_shape"] = outputs  # since 0.4
    if "backend_options" in parameters:
        options["backend_options"] = {"ptx_version": PTX, "enable_fp_fusion": True}

    @jax.custom_batching.sequential_vmap
    def launch(*arguments: jax.Array) -> Any:
        return jax_triton.triton_call(*arguments, kernel=kernel, grid=grid, name=kernel.__name__, **options)

    return launch(*arguments)


def compute_capability() -> int:
    """Of this process's GPU: 90 for 9.0."""
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return 10 * int(major) + int(minor)


def obstacles(capability: str | None) -> list[str]:
    """Why no Triton kernel can be called from this installation on a card of that compute capability."""
    try:
        import jax_triton
        import triton
    except ImportError as error:
        problem = str(error).splitlines()[0]
        return [f"jax-triton and triton cannot be imported ({problem}): pip install 'andrea_jax[cuda12]' or [cuda13]"]
    if "backend_options" in inspect.signature(jax_triton.triton_call).parameters:
        return []
    newest = NEWEST_TRITON.get((capability or "").partition(".")[0])
    if newest and tuple(map(int, triton.__version__.split(".")[:2])) > newest:
        versions = f"triton {triton.__version__} with jax-triton {jax_triton.__version__}"
        return [
            f"{versions} writes PTX for CUDA 13 on a {capability} card: pip install 'triton=={newest[0]}.{newest[1]}.*'"
        ]
    return []


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
