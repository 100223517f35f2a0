"""What a run tells the person who started it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

STAGES = {
    "wait": "waiting for another process that prepares this corpus",
    "survey": "reading the corpus and training the tokenizer",
    "encode": "turning text into tokens",
}


class Report(Protocol):
    """`say` a line; show `progress` after each step; `close` at the end."""

    def say(self, text: str) -> None: ...
    def progress(self, step: int, steps: int, loss: float | None, tokens_per_second: float, note: str) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Says nothing; for notebooks and tests."""

    def say(self, text: str) -> None:
        return None

    def progress(self, step: int, steps: int, loss: float | None, tokens_per_second: float, note: str) -> None:
        return None

    def close(self) -> None:
        return None


class ConsoleReport:
    """A progress bar on a terminal; elsewhere a line every `seconds`."""

    def __init__(self, console: Console | None = None, seconds: float = 10.0):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._seconds = seconds
        self._next_line = time.monotonic() + 1.0
        self._bar: Progress | None = None
        self._task: Any = None
        self._started: tuple[float, int] | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def progress(self, step: int, steps: int, loss: float | None, tokens_per_second: float, note: str) -> None:
        now = time.monotonic()
        first_time, first_step = self._started = self._started or (now, step)
        left = (now - first_time) / max(step - first_step, 1) * (steps - step)
        loss_text = "" if loss is None else f"loss {loss:.3f}  "
        text = f"{loss_text}{tokens_per_second:,.0f} tokens/s{note}  " + (
            "" if step == first_step else f"ETA {_clock(left)}"
        )
        if self.console.is_terminal:
            self._show_bar(step, steps, text)
        elif now >= self._next_line:
            self._next_line = now + self._seconds
            self.say(f"step {step}/{steps}  {text}")

    def preparing(self, stage: str, done: int, total: int | None, tokens: int) -> None:
        """Progress of turning the corpus into tokens."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + self._seconds
            of = f" of {total / 1e6:,.1f}" if total else ""
            made = f", {tokens:,} tokens" if tokens else ""
            self.say(f"{STAGES[stage]}: {done / 1e6:,.1f}{of} MB{made}")

    def _show_bar(self, step: int, steps: int, text: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(24),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()
        self._bar.update(self._task, completed=step, description=text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
