"""How a call is timed: many calls a sample, so that the device's queue never runs dry, and percentiles of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ROTATED = 200 * 2**20  # bytes of the inputs of successive calls on a GPU: more than any L2 cache


def sample(
    call: Callable[[int], Any], finish: Callable[[Any], Any], samples: int, seconds_a_sample: float = 2e-3
) -> dict[str, Any]:
    """Microseconds of `call(n)`, n = 0, 1, ...; `finish` waits for what a call returned, and so for those before it."""
    start = time.perf_counter()
    finish(call(0))
    first = time.perf_counter() - start
    calls = 1
    while True:
        elapsed = _measure(call, finish, calls)
        if elapsed >= seconds_a_sample or calls >= 4096:
            break
        calls *= 2
    times = [_measure(call, finish, calls) / calls * 1e6 for _ in range(samples)]
    p50, p95, p99 = np.percentile(times, [50, 95, 99])
    return {"p50": p50, "p95": p95, "p99": p99, "calls": calls, "samples": samples, "first_call_s": first}


def _measure(call: Callable[[int], Any], finish: Callable[[Any], Any], calls: int) -> float:
    start = time.perf_counter()
    for n in range(calls):
        result = call(n)
    finish(result)
    return time.perf_counter() - start


def sets(bytes_of_one: int, device: str) -> int:
    """How many sets of inputs to rotate through."""
    return max(2, -(-ROTATED // bytes_of_one)) if device == "gpu" else 2


def relative_error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The largest |found - exact| / |exact| of the results that there are, in the L2 norm."""
    errors = [0.0]
    for a, b in zip(found, exact, strict=True):
        if a is not None:
            b = np.asarray(b, np.float64)
            errors.append(float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-300)))
    return max(errors)
