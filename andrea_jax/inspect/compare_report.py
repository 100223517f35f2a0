"""A comparison of two runs as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from andrea_jax.inspect.compare_metrics import MetricDifference, count_ulps
from andrea_jax.inspect.compare_runs import Checkpoint, Comparison
from andrea_jax.inspect.ulp import Difference

SHOWN = 3  # tensors of a checkpoint that differ


def lines(found: Comparison) -> Iterator[str]:
    """What to print: settings, logs, checkpoints, and last the line that says it all."""
    yield from (f"setting     {change}" for change in found.settings)
    metrics = found.metrics
    if metrics.steps:
        yield f"logged      {len(metrics.steps)} steps in common, {metrics.steps[0]} to {metrics.steps[-1]}" + (
            "" if metrics.different else ": every value equal"
        )
        if metrics.first:
            yield f"  first     {metrics.first}"
        if metrics.largest_loss:
            yield f"  furthest  {metrics.largest_loss}"
    yield from (f"  note      {note}" for note in metrics.notes)
    for checkpoint in found.checkpoints:
        yield from checkpoint_lines(checkpoint, checkpoint in (found.parted, found.checkpoints[-1]))
    yield conclusion(found)


def checkpoint_lines(found: Checkpoint, details: bool) -> Iterator[str]:
    """A line; with details also one for each of the first tensors that differ and the one that differs most."""
    many = f"{len(found.different)} of {found.tensors} tensors differ"
    yield f"checkpoint  step {found.step}: {f'{found.tensors} tensors, all bits equal' if found.equal else many}"
    if not details:
        return
    yield from (f"  unlike    {text}" for text in found.unlike)
    shown = found.different[:SHOWN]
    yield from (f"  differs   {difference}" for difference in shown)
    if found.worst not in shown and found.worst:
        yield f"  furthest  {found.worst}"


def conclusion(found: Comparison) -> str:
    """One line: equal and in what, or where the runs part and how far."""
    steps, checkpoints = len(found.metrics.steps), found.checkpoints
    if found.equal:
        saved = f" and {len(checkpoints)} checkpoints of {checkpoints[0].tensors} tensors" if checkpoints else ""
        hashed = f"; parameters of step {checkpoints[-1].step}: {checkpoints[-1].params_hash}" if checkpoints else ""
        return f"bit-equal in {steps} logged steps{saved}{hashed}"
    parts = []
    if logged := found.metrics.first:
        before = [s for s in found.metrics.steps if s < logged.step]
        since = f"after {len(before)} equal logged steps, " if before else ""
        parts.append(f"{since}at step {logged.step}, {logged.field} by {count_ulps(logged.ulp)}")
    elif steps:
        parts.append(f"not in {steps} logged steps")
    if parted := found.parted:
        equal = [c.step for c in checkpoints if c.step < parted.step]
        since = f" (equal at {equal[-1]})" if equal else ""
        first, worst = next(iter(parted.different), None), parted.worst
        what = _apart(first) if first else parted.unlike[0]
        most = f", the most in {_apart(worst)}" if worst and worst is not first else ""
        parts.append(f"in the checkpoint of step {parted.step}{since}, {what}{most}")
    elif checkpoints:
        parts.append(f"not in {len(checkpoints)} checkpoints")
    return f"the runs part: {'; '.join(parts)}"


def _apart(found: Difference) -> str:
    return f"{found.name} by {found.relative:.1e} of its largest value ({found.ulp:,} ulp)"


def as_json(found: Comparison) -> dict[str, Any]:
    """The same for programs."""
    metrics = found.metrics
    return {
        "runs": list(found.runs),
        "equal": found.equal,
        "settings": found.settings,
        "steps": len(metrics.steps),
        "first": metrics.first and _metric(metrics.first),
        "largest_loss": metrics.largest_loss and _metric(metrics.largest_loss),
        "notes": metrics.notes,
        "checkpoints": [
            {
                "step": c.step,
                "equal": c.equal,
                "tensors": c.tensors,
                "different": [_tensor(d) for d in c.different],
                "unlike": c.unlike,
                "params_hash": c.params_hash,
            }
            for c in found.checkpoints
        ],
        "conclusion": conclusion(found),
    }


def _metric(found: MetricDifference) -> dict[str, Any]:
    return found._asdict() | {"ulp": None if found.ulp == float("inf") else found.ulp}


def _tensor(found: Difference) -> dict[str, Any]:
    return found._asdict() | {"relative": None if found.relative == float("inf") else found.relative}
