"""The operations that the benchmarks compare: their forms, their sizes, and the least that each must move.

N rows of width D, F = 4 D in the MLP, V columns of logits. The forms are functions of the same arguments: autodiff of
the formula, XLA's best, the Pallas kernel, and for a backward pass that has one the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench import formulas
from bench.formulas import EPS
from bench.head import head

from pallas_kernels.bias_gelu import bias_gelu
from pallas_kernels.gates import geglu, swiglu
from pallas_kernels.residual_norm import residual_norm

Form = Callable[..., Any]
Array = jax.ShapeDtypeStruct
IMPLEMENTATIONS = ("xla", "pallas", "jax_triton", "auto")
TRITON = ("norm", "rms_norm", "stream_norm", "gelu")  # whose backward pass is a Triton kernel too


class Sizes(NamedTuple):
    rows: int = 65_536
    width: int = 768
    vocab: int = 50_257
    dtype: Any = jnp.bfloat16


class Case(NamedTuple):
    """`unit`: bytes of the array that is counted in. `floors`: for each direction the least that is moved, in units."""

    forms: dict[str, Form]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    unit: int
    floors: dict[str, float]


def norm(x: Any, gain: Any, shift: Any, form: Any) -> jax.Array:
    return residual_norm(x, None, gain, shift, EPS, "layer", form)[1]


def rms_norm(x: Any, gain: Any, form: Any) -> jax.Array:
    return residual_norm(x, None, gain, None, EPS, "rms", form)[1]


def stream_norm(x: Any, gain: Any, shift: Any, form: Any) -> tuple[jax.Array, jax.Array]:
    return residual_norm(x, None, gain, shift, EPS, "layer", form)


def add_norm(x: Any, delta: Any, gain: Any, shift: Any, form: Any) -> tuple[jax.Array, jax.Array]:
    return residual_norm(x, delta, gain, shift, EPS, "layer", form)


def cases(sizes: Sizes) -> dict[str, Case]:
    N, D, V, dtype = sizes
    x, vector = Array((N, D), dtype), Array((D,), jnp.float32)
    h, bias = Array((N, 4 * D), dtype), Array((4 * D,), jnp.float32)
    padded = -(-V // 128) * 128
    matrix, labels, weights = Array((D, padded), jnp.float32), Array((N,), jnp.int32), Array((N,), jnp.float32)
    u, U, C = nbytes(x), nbytes(h), nbytes(Array((N, padded), dtype))
    silu, gelu = partial(formulas.gated, jax.nn.silu), partial(formulas.gated, jax.nn.gelu)
    heads = forms(partial(formulas.head, V), partial(head, V))
    return {
        "norm": Case(forms(formulas.layer_norm, norm), (x, vector, vector), u, {"forward": 2, "backward": 3}),
        "rms_norm": Case(forms(formulas.rms_norm, rms_norm), (x, vector), u, {"forward": 2, "backward": 3}),
        "add_norm": Case(forms(formulas.add_norm, add_norm), (x, x, vector, vector), u, {"forward": 4}),
        "stream_norm": Case(forms(formulas.stream_norm, stream_norm), (x, vector, vector), u, {"backward": 4}),
        "gelu": Case(forms(formulas.gelu, bias_gelu), (h, bias), U, {"forward": 2, "backward": 3}),
        "swiglu": Case(forms(silu, swiglu), (h, h), U, {"forward": 3, "backward": 5}),
        "geglu": Case(forms(gelu, geglu), (h, h), U, {"forward": 3, "backward": 5}),
        "cross_entropy": Case(heads, (x, matrix, labels, weights), C, {"gradient": 5}),
    }


def forms(formula: Form, operation: Form) -> dict[str, Form]:
    def as_form(implementation: str) -> Form:
        return lambda *arguments: operation(*arguments, implementation)

    return {"autodiff": formula, **{form: as_form(form) for form in IMPLEMENTATIONS}}


def names(sizes: Sizes) -> dict[str, tuple[str, str]]:
    """What can be measured: for each name the operation and the direction."""
    return {
        operation if direction == "gradient" else f"{operation}_{direction}": (operation, direction)
        for operation, case in cases(sizes).items()
        for direction in case.floors
    }


def nbytes(x: Any) -> int:
    return int(x.size) * jnp.dtype(x.dtype).itemsize
