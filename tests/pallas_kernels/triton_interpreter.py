"""Triton kernels on a CPU, in its interpreter, which is chosen when Triton is imported: in a process of its own."""

import concurrent.futures
import importlib
import multiprocessing
import os

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import triton_launch

GUARD = 64  # numbers on either side of an array, not a number: what is read outside it shows, what is written too


class Memory:
    """An array where the interpreter expects a tensor; it has one memory, so all copies to and fro are itself."""

    def __init__(self, array):
        self.guarded = np.full(array.size + 2 * GUARD, np.nan, array.dtype)
        self.array = self.guarded[GUARD:-GUARD].reshape(array.shape)
        self.array[...] = array
        self.dtype = array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def itself(self, *_, **__):
        return self

    untyped_storage = cpu = new_empty = set_ = storage_offset = size = stride = copy_ = itself

    def values(self):
        outside = self.guarded[:GUARD], self.guarded[-GUARD:]
        assert all(np.isnan(guard.astype(np.float32)).all() for guard in outside), "written outside an array"
        return jnp.asarray(self.array)


def call(kernel, arguments, outputs, grid, num_warps, **constants):
    """As triton_launch.call; what the kernel does not write stays NaN.

    The interpreter cuts float32 off to bfloat16 where a GPU rounds, so there it writes float32, which is rounded here.
    """
    inputs = [Memory(np.asarray(a)) for a in arguments]
    dtypes = [np.float32 if o.dtype == jnp.bfloat16 else o.dtype for o in outputs]
    results = [Memory(np.full(o.shape, np.nan, dtype)) for o, dtype in zip(outputs, dtypes, strict=True)]
    kernel[grid](*inputs, *results, **constants)
    return [result.values().astype(o.dtype) for result, o in zip(results, outputs, strict=True)]


def start():
    os.environ["TRITON_INTERPRET"] = "1"
    jax.config.update("jax_platforms", "cpu")
    triton_launch.call = call


def backward(operation, args, options):
    module = importlib.import_module(f"pallas_kernels.{operation}_triton")
    return jax.tree.map(np.asarray, module.backward(*args, **options))


def interpreter():
    """A pool of one process for `submit(backward, operation, args, options)`."""
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start)
