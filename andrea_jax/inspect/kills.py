"""Training processes that are killed at a chosen moment, by SIGKILL from outside, and what the kill hit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from andrea_jax.checkpoint import TEMPORARY, complete_steps
from andrea_jax.settings import RunError, UserError

KINDS = ("accumulation", "save", "twice", "epoch", "random")
TAIL = 4096  # bytes of metrics.jsonl that hold its last lines
NAP = 0.0005  # seconds between two looks
TOO_SHORT = "the run was over before it could be killed: its steps are too short; raise --steps"


@dataclasses.dataclass(frozen=True)
class Moment:
    """While the device is at `step`, `fraction` of it done, or while the checkpoint of `step` is being written."""

    during: Literal["step", "save"]
    step: int
    fraction: float
    why: str


def plan(kinds: Sequence[str], steps: int, every: int, epoch_end: int, seed: int) -> list[Moment]:
    """The moments of these kinds, in order of steps. A checkpoint comes `every` steps, an epoch ends in `epoch_end`."""
    draw = random.Random(seed)
    first = 2 * every + every // 2
    chosen: dict[str, list[tuple[Literal["step", "save"], int, str]]] = {
        "accumulation": [("step", 1 + every // 2, "part-way through its batch")],
        "save": [("save", 2 * every, "during a save")],
        "twice": [("step", first, "first of two"), ("step", first + 1, "second of two")],
        "epoch": [("step", epoch_end, "as an epoch ends")],
        "random": [("step", draw.randint(2, steps - 1), "at random")],
    }
    moments = [Moment(d, step, draw.random(), why) for kind in KINDS if kind in kinds for d, step, why in chosen[kind]]
    return sorted(moments, key=lambda m: m.step)


@dataclasses.dataclass(frozen=True)
class Process:
    """How to train: the command, its environment, the run folder and where its output goes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    run_dir: Path
    log: Path

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The running process; it is dead when the context is left."""
        with open(self.log, "wb") as log:
            process = subprocess.Popen(self.command, env=dict(self.environment), stdout=log, stderr=log)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def finish(self) -> None:
        """Trains to the end. Raises what `failure` makes of an error."""
        with self.started() as process:
            if process.wait():
                raise self.failure(process.returncode)

    def failure(self, code: int) -> Exception:
        """The error of a process that ended with `code`, in one line: UserError for 2, else RunError."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "nothing")
        said = said.removeprefix("error: ")
        return UserError(said) if code == 2 else RunError(f"training ended with {code}: {said}")

    def kill_when(self, condition: Callable[[], bool]) -> None:
        """Starts it and kills it as soon as the condition holds. Raises UserError if it was done before."""
        with self.started() as process:
            while not condition():
                if process.poll():
                    raise self.failure(process.returncode)
                if process.returncode == 0:
                    raise UserError(TOO_SHORT)
                time.sleep(NAP)
            process.kill()
            if process.wait() == 0:
                raise UserError(TOO_SHORT)


def kill_at(process: Process, moment: Moment, step_seconds: float) -> str:
    """Starts the process, kills it at the moment, and says what was hit and from where it will go on."""
    folder = process.run_dir / "checkpoints"
    watch = Watch(process.run_dir / "metrics.jsonl")

    def in_step() -> bool:
        if watch.last_step() < moment.step - 1:  # the line of a step is written when the next one is on the device
            return False
        time.sleep(moment.fraction * step_seconds)
        return True

    def saving() -> bool:
        return any(folder.glob(f"{moment.step}{TEMPORARY}*")) or moment.step in complete_steps(folder)

    process.kill_when(in_step if moment.during == "step" else saving)
    saved, step = complete_steps(folder), watch.last_step() + 1
    on_time = step == moment.step
    if moment.during == "save":
        hit = f"while step {moment.step} was being saved" if moment.step not in saved else f"step {moment.step} saved"
    else:
        hit = f"in step {step}" + (f", {moment.fraction:.0%} of it" if on_time else f" (aimed at {moment.step})")
    return f"{hit} ({moment.why}); goes on from {f'step {saved[-1]}' if saved else 'the start'}"


class Watch:
    """The last training step in a metrics.jsonl, once the process that was just started has written it anew."""

    def __init__(self, path: Path):
        self._path, self._old = path, _inode(path)

    def last_step(self) -> int:
        """0 before there is one."""
        if _inode(self._path) == self._old:
            return 0
        with open(self._path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(json.JSONDecodeError):
                record = json.loads(line)
                if isinstance(record, dict) and record.get("kind") == "train":
                    return record["step"]
        return 0


def _inode(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return None
