"""Whether a killed and resumed run is, bit by bit, the run that was never killed: by killing real processes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from andrea_jax.inspect import determinism
from andrea_jax.inspect.compare_report import conclusion, lines
from andrea_jax.inspect.compare_runs import Comparison, compare_runs
from andrea_jax.inspect.kills import Process, kill_at, plan
from andrea_jax.inspect.layouts import Devices, Layout, environment_of, parse_layouts, probe
from andrea_jax.inspect.moved_run import Drift, Move, drift, move, rounding
from andrea_jax.inspect.verify_settings import CHECKPOINTS, check_space, choose
from andrea_jax.sharding import ROWS
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import TokenCorpus
from andrea_jax.train.run_folder import read_metrics

Command = Callable[[RunConfig, Path], list[str]]  # writes the settings to the file and says how to train with them
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """Steps of the run, kinds of kills, --devices as text, seed of the moments, whether to set flags on GPUs."""

    steps: int
    kinds: tuple[str, ...]
    devices: str
    seed: int
    set_flags: bool


@dataclasses.dataclass(frozen=True)
class Finding:
    """Two runs on the same devices compared, the moves to others, and on GPUs flags and rates with and without."""

    comparison: Comparison
    kills: list[str]
    moves: list[Move]
    drift: Drift | None
    flags: dict[str, str]
    rates: dict[str, float]

    @property
    def good(self) -> bool:
        moved = all(m.good for m in self.moves) and (self.drift is None or self.drift.good)
        return self.comparison.equal and moved

    def __str__(self) -> str:
        """The line that says it all."""
        text = conclusion(self.comparison)
        if self.comparison.equal:
            text = f"{len(self.kills)} kill{'s' * (len(self.kills) != 1)}: {text}"
        for bad in [m for m in self.moves if not m.good]:
            text += f"; moved {bad}"
        if self.drift and not self.drift.good:
            text += f"; {self.drift}"
        elif self.moves and self.good:
            moves = f"{len(self.moves)} move{'s' * (len(self.moves) != 1)}"
            text += f"; {moves} to other devices: restored bit-equal, losses to rounding"
        return text


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where the runs are made, on what, and how."""

    work: Path
    config: RunConfig
    environment: Mapping[str, str]
    found: Devices
    command: Command

    def process(self, name: str, layout: Layout, run: str = "") -> Process:
        """A training process called `name` over the layout's devices, in the run folder `run`."""
        run_dir = self.work / (run or name)
        run_dir.mkdir(exist_ok=True)
        train = dataclasses.replace(self.config.train, parallel=layout.parallel, run_dir=str(run_dir))
        config = dataclasses.replace(self.config, mesh=layout.mesh, train=train)
        command = self.command(config, self.work / f"{name}.gin")
        environment = environment_of(layout, self.environment, self.found)
        return Process(command, environment, run_dir, self.work / f"{name}.log")


def verify_resume(
    config: RunConfig,
    bound: Collection[str],
    corpus: TokenCorpus,
    options: Options,
    environment: Mapping[str, str],
    command: Command,
    work: Path,
    say: Say,
) -> Finding:
    """Trains in the folder `work`: straight, with kills, and over other devices; says what it does and finds.

    Raises:
        UserError: options that do not fit. RunError: a training process failed by itself.
    """
    found = probe(environment)
    layouts = parse_layouts(options.devices, config, found)
    every = options.steps // max(CHECKPOINTS, len(layouts))
    rows = max(math.prod(layout.sizes[axis] for axis in ROWS) for layout in layouts)
    chosen = choose(config, bound, corpus, options.steps, every, rows, work)
    check_space(chosen.config, (2 + (len(layouts) > 1)) * (options.steps // every), work)
    gpus = max(layout.devices for layout in layouts) if found.platform == "gpu" else 0
    lacking = determinism.missing(environment, gpus)
    prepared = determinism.deterministic(environment, gpus) if options.set_flags else dict(environment)
    say(f"runs      {options.steps} steps on {layouts[0]} x {found.kind}, saved every {every}")
    for note in chosen.notes + flag_notes(gpus, lacking, options.set_flags):
        say(note)

    bench = Bench(work, chosen.config, prepared, found, command)
    bench.process("straight", layouts[0]).finish()
    rates = {"straight": rate(work / "straight")}
    say(f"straight  {options.steps} steps, {rates['straight']:,.0f} tokens/s")
    seconds = chosen.config.train.batch_size * chosen.config.model.context_length / rates["straight"]
    killed = bench.process("killed", layouts[0])
    kills = []
    for moment in plan(options.kinds, options.steps, every, chosen.epoch_end, options.seed):
        kills.append(kill_at(killed, moment, seconds))
        say(f"killed    {kills[-1]}")
    killed.finish()
    comparison = compare_runs(work / "straight", work / "killed")
    for line in [] if comparison.equal else lines(comparison):
        say(f"  {line}")

    moves, furthest = [], None
    if len(layouts) > 1:
        limit = rounding(chosen.config, config.engine.dtype_on(found.platform))
        legs = [(str(x), bench.process(f"leg{i}", x, "moved"), x.changes()) for i, x in enumerate(layouts)]
        moves = move(work / "straight", legs, every, limit, lambda made: say(f"moved     {made}"))
        furthest = drift(work / "straight", work / "moved", config.engine.dtype_on(found.platform))
        say(f"  {furthest}")
    if gpus and (fast := determinism.fast(environment)) != prepared:
        dataclasses.replace(bench, environment=fast).process("fast", layouts[0]).finish()
        rates["fast"] = rate(work / "fast")
        say(cost(rates, compare_runs(work / "straight", work / "fast")))
    return Finding(comparison, kills, moves, furthest, lacking, rates)


def flag_notes(gpus: int, lacking: Mapping[str, str], set_flags: bool) -> list[str]:
    """What equal bits need on GPUs, and whether it is there."""
    names = " ".join(f"{name}={value}" for name, value in lacking.items())
    if not gpus:
        return []
    if not lacking:
        return ["flags     all that equal bits need on GPUs are set"]
    if set_flags:
        return [f"flags     set for these runs: {names}; a run of yours needs them too to give equal bits"]
    return [f"flags     missing: {names}; without them a resumed run may have other bits"]


def rate(run_dir: Path) -> float:
    """Tokens a second: the median over steps, without the first two."""
    return statistics.median([r["tokens_per_second"] for r in read_metrics(run_dir) if r["kind"] == "train"][2:])


def cost(rates: Mapping[str, float], comparison: Comparison) -> str:
    """What determinism costs, and whether a run without the flags has other bits."""
    lost = 1 - rates["straight"] / rates["fast"]
    return (
        f"cost      {rates['straight']:,.0f} tokens/s with the flags, {rates['fast']:,.0f} without ({lost:.1%} lost); "
        f"with and without: {conclusion(comparison)}"
    )
