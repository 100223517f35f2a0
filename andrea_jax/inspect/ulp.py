"""How far two arrays are apart, in units in the last place: how many numbers of their type lie between."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CHUNK = 2**22  # elements compared at a time, so that a large tensor needs little more memory than itself


class Difference(NamedTuple):
    """Two arrays whose bits differ: in how many elements, and where they are furthest apart.

    `relative` is the largest difference divided by the largest magnitude of both arrays; `ulp` is of single elements,
    and large where they are near zero.
    """

    name: str
    elements: int
    different: int
    ulp: int
    relative: float
    where: tuple[int, ...]  # of the largest ulp, with the two values there
    values: tuple[float, float]

    def __str__(self) -> str:
        where = f" at [{', '.join(map(str, self.where))}]" if self.where else ""
        return (
            f"{self.name}: {self.different:,} of {self.elements:,} elements differ, by up to {self.relative:.1e} of "
            f"its largest value and {self.ulp:,} ulp ({self.values[0]:.9g} and {self.values[1]:.9g}{where})"
        )


def bits(x: np.ndarray) -> np.ndarray:
    """The array's bit patterns, flat, as unsigned integers."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


def ordinals(x: np.ndarray) -> np.ndarray:
    """int64: each number's place among those of its type, so that neighbours differ by one and both zeros are 0."""
    if np.issubdtype(x.dtype, np.integer):
        return x.reshape(-1).astype(np.int64)
    pattern = bits(x).astype(np.int64)
    negative = 1 << (8 * x.dtype.itemsize - 1)
    return np.where(pattern < negative, pattern, negative - pattern)


def compare_arrays(name: str, a: np.ndarray, b: np.ndarray) -> Difference | None:
    """None if every bit is equal. Both must have one shape and one dtype of at most 32 bits."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    different, worst, place, apart, largest = 0, -1, 0, 0.0, 0.0
    bits_a, bits_b = bits(a), bits(b)
    if np.array_equal(bits_a, bits_b):
        return None
    for start in range(0, a.size, CHUNK):
        part = slice(start, start + CHUNK)
        unequal = bits_a[part] != bits_b[part]
        x, y = a.reshape(-1)[part].astype(np.float64), b.reshape(-1)[part].astype(np.float64)
        largest = max(largest, np.nanmax(np.abs(x), initial=0), np.nanmax(np.abs(y), initial=0))
        if not unequal.any():
            continue
        different += int(unequal.sum())
        with np.errstate(invalid="ignore"):
            gaps = np.abs(x - y)[unequal]
        apart = max(apart, float(np.where(np.isnan(gaps), np.inf, gaps).max()))
        distance = np.abs(ordinals(a.reshape(-1)[part]) - ordinals(b.reshape(-1)[part]))
        distance[~unequal] = -1
        if distance.max() > worst:
            worst, place = int(distance.max()), start + int(distance.argmax())
    where = tuple(int(i) for i in np.unravel_index(place, a.shape))
    relative = apart / largest if largest else 0.0
    return Difference(name, a.size, different, worst, relative, where, (float(a[where]), float(b[where])))


def float32_ulps(a: float, b: float) -> float:
    """|a - b| in units in the last place of the larger as float32; the numbers themselves may be finer."""
    if a == b or (np.isnan(a) and np.isnan(b)):
        return 0.0
    if not (np.isfinite(a) and np.isfinite(b)):
        return float("inf")
    return abs(a - b) / float(np.spacing(np.float32(max(abs(a), abs(b)))))
