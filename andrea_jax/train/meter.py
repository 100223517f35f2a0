"""Reads each step's metrics one step late, so that the device never waits, and writes a record every few steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from andrea_jax.checkpoint import describe_last
from andrea_jax.inspect.flops import model_flops_utilization
from andrea_jax.settings import RunError
from andrea_jax.train.config import RunConfig
from andrea_jax.train.report import Report
from andrea_jax.train.run_folder import MetricsLog, NoLog

PHASES = ("data", "step", "evaluation", "save")


class Meter:
    """Collects metrics and times between records; `tokens` counts all that the run has trained on.

    `last_saved` gives the step of the newest checkpoint, for the message of a run that must stop.
    """

    def __init__(
        self,
        config: RunConfig,
        log: MetricsLog | NoLog,
        report: Report,
        first: int,
        tokens: int,
        last_saved: Callable[[], int | None],
    ):
        self._last_saved = last_saved
        self._config, self._log, self._report = config, log, report
        self._first = first
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._records: list[dict[str, float]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._rate = 0.0
        self.tokens = tokens

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Counts the time spent inside to `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, the time spent waiting for them counted to `data`."""
        while True:
            with self.timed("data"):
                batch = next(batches)
            yield batch

    def read(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of `step`, just dispatched, and reads those of the step before it."""
        self.catch_up()
        self._pending = step, metrics

    def catch_up(self) -> None:
        """Reads the metrics that are still on the device; waits for their step.

        Raises:
            RunError: loss or gradient are not finite, and `train.nonfinite` says stop.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if step == self._first + 1:
            self._report_first(values)
        if not values["finite"]:
            self._refuse(step, values)
        self.tokens += int(values["tokens"])
        self._records.append(values)
        rate = sum(r["tokens"] for r in self._records) / max(self._seconds["step"] + self._seconds["data"], 1e-9)
        shown = self._rate or rate  # of the last record: a single step, read late, says little
        self._report.progress(step, self._config.train.steps, values["nll"], shown, _mfu_text(self._config, shown))
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self._write(step, rate)

    def _write(self, step: int, tokens_per_second: float) -> None:
        good = [r for r in self._records if r["finite"]]
        record: dict[str, Any] = {
            "kind": "train",
            "step": step,
            "tokens": self.tokens,
            "loss": _mean(good, "nll"),
            "learning_rate": self._records[-1]["learning_rate"],
            "grad_norm": good[-1]["grad_norm"] if good else None,
            "param_norm": self._records[-1]["param_norm"],
            **{name: _mean(good, name) for name in self._records[-1] if name.startswith("moe_")},
            "skipped": len(self._records) - len(good),
            "tokens_per_second": tokens_per_second,
            "mfu": model_flops_utilization(self._config.model, tokens_per_second),
            **{f"seconds_{phase}": round(seconds, 6) for phase, seconds in self._seconds.items()},
        }
        self._log.write(record)
        self._rate = tokens_per_second
        self._records, self._seconds = [], dict.fromkeys(PHASES, 0.0)

    def _report_first(self, values: dict[str, float]) -> None:
        if self._first == 0:
            size = self._config.model.vocab_size
            uniform = math.log(size)
            self._report.say(
                f"initial loss {values['nll']:.3f}; uniform guessing would give ln({size}) = {uniform:.3f}"
            )

    def _refuse(self, step: int, values: dict[str, float]) -> None:
        what = f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}"
        if self._config.train.nonfinite == "skip":
            self._report.say(f"{what}: not finite, the step was skipped")
            return
        last = describe_last(self._last_saved(), "good")
        raise RunError(
            f"{what}: not finite; {last}. Try a smaller schedule.peak, a longer schedule.warmup, optimizer.clip_norm, "
            "engine.dtype = 'float32', or train.nonfinite = 'skip'"
        )


def _mean(records: list[dict[str, float]], name: str) -> float | None:
    """Over all tokens."""
    weight = sum(r["tokens"] for r in records)
    return sum(r[name] * r["tokens"] for r in records) / weight if weight else None


def _mfu_text(config: RunConfig, tokens_per_second: float) -> str:
    utilization = model_flops_utilization(config.model, tokens_per_second)
    return "" if utilization is None else f"  MFU {utilization:.0%}"
