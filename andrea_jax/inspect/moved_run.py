"""A run that goes on over other devices: what is restored must be bit-equal, the losses equal to rounding."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from andrea_jax.checkpoint import complete_steps, read_tensors, saved_items
from andrea_jax.inspect.compare_metrics import MetricDifference, compare_metrics, count_ulps
from andrea_jax.inspect.kills import Process, Watch
from andrea_jax.inspect.state_hash import tensor_hash
from andrea_jax.inspect.ulp import float32_ulps
from andrea_jax.settings import RunError
from andrea_jax.train.config import RunConfig
from andrea_jax.train.run_folder import read_metrics

EPS = float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Move:
    """One change of devices: tensors that were restored to other bits, and the first loss on both sides."""

    step: int
    source: str
    target: str
    tensors: int
    changed: list[str]
    losses: tuple[float, float]
    tolerance: float

    @property
    def good(self) -> bool:
        return not self.changed and abs(self.losses[0] - self.losses[1]) <= self.tolerance * abs(self.losses[0])

    def __str__(self) -> str:
        bits = f"{len(self.changed)} of" if self.changed else "all"
        restored = f"{bits} {self.tensors} tensors restored " + ("to other bits" if self.changed else "bit-equal")
        first = f", the first {self.changed[0]}" if self.changed else ""
        limit = count_ulps(self.tolerance / EPS)
        return (
            f"{self.source} -> {self.target} at step {self.step}: {restored}{first}; loss of step {self.step + 1} "
            f"{count_ulps(float32_ulps(*self.losses))} apart (rounding: up to {limit})"
        )


@dataclasses.dataclass(frozen=True)
class Drift:
    """The largest relative difference of any loss of a run that moved. Rounding grows from step to step, so half of
    the digits of the activations' type are allowed."""

    relative: float
    furthest: MetricDifference | None
    allowed: float

    @property
    def good(self) -> bool:
        return self.relative <= self.allowed

    def __str__(self) -> str:
        where = str(self.furthest) if self.furthest else "every loss is equal"
        return f"furthest from the run that stayed: {where}, {self.relative:.1e} of it (allowed: {self.allowed:.1e})"


def rounding(config: RunConfig, dtype: Any) -> float:
    """How far, relatively, one loss may be from that of another layout, for the same parameters and batch.

    Its n terms are added in another order: an error of the size of sqrt(n) float32 roundings. Each term goes through
    about 8 products and norms a block, whose sums too are added in another order and rounded to the activations'
    type, an error in the mean of n terms that is sqrt(n) times smaller.
    """
    n = config.train.batch_size * config.model.context_length
    return EPS * math.sqrt(n) + 8 * (config.model.n_layer + 1) * float(jnp.finfo(dtype).eps) / math.sqrt(n)


def move(
    straight: Path,
    legs: list[tuple[str, Process, dict[str, Any]]],
    every: int,
    tolerance: float,
    made: Callable[[Move], None],
) -> list[Move]:
    """Goes on with a copy of `straight`, run on the first leg's devices, over those of each further leg in turn.

    A leg has its name, how to train on it, and the settings that say so. All share one run folder. `made` is told of
    each move.
    """
    run_dir = legs[0][1].run_dir
    step = every
    shutil.copytree(straight / "checkpoints" / str(step), run_dir / "checkpoints" / str(step))
    shutil.copy(straight / "metrics.jsonl", run_dir)
    loss = _loss(straight, step + 1)
    moves = []
    for i in range(1, len(legs)):
        name, process, changes = legs[i]
        changed, tensors = changed_by_restoring(process.environment, run_dir / "checkpoints", step, changes)
        if i == len(legs) - 1:
            process.finish()
        else:
            _kill_after(process, step + every)
        moves.append(Move(step, legs[i - 1][0], name, tensors, changed, (loss, _loss(run_dir, step + 1)), tolerance))
        made(moves[-1])
        step += every
        loss = _loss(run_dir, step + 1) if i < len(legs) - 1 else 0.0
    return moves


def changed_by_restoring(
    environment: Mapping[str, str], folder: Path, step: int, changes: dict[str, Any]
) -> tuple[list[str], int]:
    """Names of the tensors that come back with other bits on the devices of `environment`, and how many there are."""
    command = [sys.executable, "-m", "andrea_jax.inspect.state_hash", str(folder), str(step), json.dumps(changes)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"step {step} could not be restored: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    saved = {
        f"{item} {name}": tensor_hash(x)
        for item in saved_items(folder, step)
        for name, x in read_tensors(folder, step, item).items()
    }
    return [name for name in saved | found if saved.get(name) != found.get(name)], len(saved)


def drift(straight: Path, moved: Path, dtype: Any) -> Drift:
    """The loss that differs most between the run that stayed and the one that moved."""
    found = compare_metrics(read_metrics(straight), read_metrics(moved)).largest_loss
    if found is None or None in found.values:
        return Drift(0.0 if found is None else math.inf, found, math.sqrt(float(jnp.finfo(dtype).eps)))
    a, b = (float(x) for x in found.values if x is not None)
    return Drift(abs(a - b) / abs(a), found, math.sqrt(float(jnp.finfo(dtype).eps)))


def _kill_after(process: Process, step: int) -> None:
    """Kills it when the checkpoint of `step` is complete and the loss of the next step known; drops later ones."""
    folder, watch = process.run_dir / "checkpoints", Watch(process.run_dir / "metrics.jsonl")
    process.kill_when(lambda: watch.last_step() > step and step in complete_steps(folder))
    for later in complete_steps(folder):
        if later > step:
            shutil.rmtree(folder / str(later))


def _loss(run_dir: Path, step: int) -> float:
    return next(r["loss"] for r in read_metrics(run_dir) if r["kind"] == "train" and r["step"] == step)
