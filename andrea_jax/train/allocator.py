"""Keeps the C library from giving memory back to the system between steps: a tenth of a CPU run's time."""

from __future__ import annotations

import ctypes

import jax

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Sets glibc's malloc to one arena that is never trimmed, for this process; False where that cannot be done.

    XLA allocates a step's temporaries anew each time; returned to the system, their pages must be cleared again.
    Nothing is done where the computation is not on a CPU.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    largest = 2**31 - 1
    return all([mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_THRESHOLD, 2**30), mallopt(M_TRIM_THRESHOLD, largest)])
