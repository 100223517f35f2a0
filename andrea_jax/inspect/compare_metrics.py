"""Where the logs of two runs part: the first step and value of metrics.jsonl that differ, and by how much."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from andrea_jax.inspect.ulp import float32_ulps

TIMES = re.compile("seconds_.*|tokens_per_second|mfu")  # measured, not computed
SUMS = ("loss", "skipped")  # of a `train` line: over all steps since the line before it


class MetricDifference(NamedTuple):
    """One value of metrics.jsonl that differs; `ulp` in those of float32."""

    kind: str
    step: int
    field: str
    values: tuple[float | None, float | None]
    ulp: float

    def __str__(self) -> str:
        a, b = ("nothing" if x is None else f"{x:.9g}" for x in self.values)
        kind = "" if self.kind == "train" else f"{self.kind} "
        return f"{kind}{self.field} of step {self.step} is {a} and {b}, {count_ulps(self.ulp)} apart"


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Steps that both logged, the values that differ in order of steps, and what could not be compared."""

    steps: list[int]
    different: list[MetricDifference]
    notes: list[str]

    @property
    def first(self) -> MetricDifference | None:
        return self.different[0] if self.different else None

    @property
    def largest_loss(self) -> MetricDifference | None:
        """The training loss that differs most."""
        losses = [d for d in self.different if d.field == "loss" and d.kind == "train"]
        return max(losses, key=lambda d: d.ulp, default=None)


def compare_metrics(a: Iterable[dict[str, Any]], b: Iterable[dict[str, Any]], equal_until: int = 0) -> Metrics:
    """Compares what the lines of each step computed, not what they timed.

    A line's loss is the mean of the steps since the line before it, or since the run was resumed. Where the other
    run's is of other steps, it is left out with a note: the lines before have other steps, or the losses differ though
    the runs were equal until later, as their checkpoints of step `equal_until` show.
    """
    ours, theirs = ({(r["step"], r["kind"]): r for r in records} for records in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    different: list[MetricDifference] = []
    left_out: list[int] = []
    for step, kind in common:
        x, y = ours[step, kind], theirs[step, kind]
        names = [n for n in x if n in y and n not in ("kind", "step") and not TIMES.fullmatch(n)]
        found = [MetricDifference(kind, step, n, (x[n], y[n]), _ulps(x[n], y[n])) for n in names if x[n] != y[n]]
        sums = [d for d in found if kind == "train" and d.field in SUMS]
        before = [max((s for s, k in run if k == "train" and s < step), default=0) for run in (ours, theirs)]
        resumed = before[0] < step - 1 and step <= equal_until
        if sums and (before[0] != before[1] or resumed):
            left_out.append(step)
            found = [d for d in found if d not in sums]
        different += found
    steps = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
    notes = [f"loss of step {steps}: the mean of other steps in the other run, so not compared"] * bool(left_out)
    return Metrics(sorted({step for step, _ in common}), different, notes)


def count_ulps(ulp: float) -> str:
    """`3 ulp`; a fraction where the numbers are finer than float32."""
    return f"{ulp:,.0f} ulp" if ulp >= 1 else f"{ulp:.1g} ulp"


def _ulps(a: Any, b: Any) -> float:
    return float("inf") if a is None or b is None else float32_ulps(a, b)
