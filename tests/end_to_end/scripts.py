"""Runs the scripts as a user does, on a model small enough to compile in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = {
    "ModelConfig.n_layer": 1,
    "ModelConfig.d_model": 16,
    "ModelConfig.n_head": 2,
    "ModelConfig.context_length": 16,
    "data.tokenizer": "bytes",
    "train.batch_size": 4,
    "train.steps": 20,
    "train.eval_windows": 8,
    "train.sample_tokens": 8,
    "train.tensorboard": False,
    "schedule.warmup": 5,
}
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "mix", "potions")


def write_text(path: Path, lines: int = 400) -> Path:
    """A text with some regularity and no repetition."""
    text = "".join(
        " ".join(WORDS[(i * j + i // 3) % len(WORDS)] for j in range(1, 9)) + f" {i}.\n" for i in range(lines)
    )
    path.write_text(text)
    return path


def settings(folder: Path, **changes: object) -> list[str]:
    """Flags of a tiny run in `folder`; changes are written with __ for the dot."""
    values = TINY | {
        "data.path": folder / "text.txt",
        "data.prepared": folder / "prepared",
        "train.run_dir": folder / "run",
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--gin.{name}={value}" for name, value in values.items() if value is not ...]


def start(script: str, *flags: object, **options: object) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    command = [sys.executable, str(EXPERIMENTS / script), *map(str, flags)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def run(script: str, *flags: object, **options: object) -> subprocess.CompletedProcess[str]:
    process = start(script, *flags, **options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def succeed(script: str, *flags: object, **options: object) -> str:
    """Standard output of a run that must end well."""
    done = run(script, *flags, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(script: str, *flags: object, code: int = 2, **options: object) -> str:
    """The one or two lines that a run with wrong input prints; no traceback, and the exit code."""
    done = run(script, *flags, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, done.stderr
    assert len(message[0]) < 600, message[0]
    return message[0]
