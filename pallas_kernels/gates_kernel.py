"""The gates as Pallas kernels: one for each direction, over tiles of all numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gates_xla import gradients, product
from pallas_kernels.launch import call, load, pl, store

TILE = 2048  # numbers a program holds at once: 16 for each of its 128 threads
NUM_WARPS = 4


def forward(gate: Any, up: Any, *, activation: str, interpret: bool = False) -> jax.Array:
    """act(gate) up. Reads both and writes one: 3U."""
    (y,) = _elementwise(lambda g, u: (product(g, u, activation),), "gate_forward", 1, interpret, gate, up)
    return y


def backward(gate: Any, up: Any, dy: Any, *, activation: str, interpret: bool = False) -> tuple[jax.Array, ...]:
    """(dgate, dup). Reads gate, up and dy, writes two: 5U."""
    f = functools.partial(gradients, activation=activation)
    return _elementwise(f, "gate_backward", 2, interpret, gate, up, dy)


def _elementwise(f: Any, name: str, outputs: int, interpret: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """f on arrays of one shape and dtype, in float32; it returns `outputs` arrays."""
    like = arrays[0]
    M = like.size

    def kernel(*refs: Any) -> None:
        place = pl.program_id(0) * TILE + jnp.arange(TILE)
        results = f(*(load(ref, place, place < M) for ref in refs[: len(arrays)]))
        for ref, result in zip(refs[len(arrays) :], results, strict=True):
            store(ref, place, result, place < M)

    out_shape = (jax.ShapeDtypeStruct((M,), like.dtype),) * outputs
    run = call(kernel, name, (pl.cdiv(M, TILE),), out_shape, NUM_WARPS, interpret)
    return tuple(y.reshape(like.shape) for y in run(*(x.reshape(M) for x in arrays)))
