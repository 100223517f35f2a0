"""The files of a run: metrics.jsonl, tensorboard/, samples.txt, config.gin; nothing is left half written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from andrea_jax.files import write_file
from andrea_jax.settings import UserError
from andrea_jax.train.config import TrainConfig


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the run folder, made if need be. Raises UserError if it cannot be made or another process trains in it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = open(run_dir / ".lock", "w")  # noqa: SIM115  (held while training)
    except OSError as error:
        raise UserError(f"train.run_dir = {str(run_dir)!r} cannot be used: {error.strerror}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is training in {run_dir}; choose another train.run_dir") from error
        yield


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut off by a kill is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class MetricsLog:
    """Appends records to metrics.jsonl, TensorBoard and, if asked for, Weights & Biases."""

    def __init__(self, run_dir: Path, config: TrainConfig, settings: dict[str, Any], start_step: int):
        kept = [r for r in read_metrics(run_dir) if r["step"] <= start_step]  # a killed run may have gone further
        write_file(run_dir / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in kept).encode())
        self._file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115  (closed in close)
        self._tensorboard = _tensorboard(run_dir, start_step) if config.tensorboard else None
        self._wandb = _wandb(run_dir, config.wandb, settings) if config.wandb else None

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        values = {k: v for k, v in record.items() if k not in ("step", "kind") and v is not None}
        prefix = record["kind"]
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{prefix}/{name}", value, record["step"])
        if self._wandb:
            self._wandb.log({f"{prefix}/{k}": v for k, v in values.items()}, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


class NoLog:
    """Of a process that leaves the writing to process 0."""

    def write(self, record: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


def _tensorboard(run_dir: Path, start_step: int) -> Any:
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1 if start_step else None)


def _wandb(run_dir: Path, project: str | None, settings: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"train.wandb = {project!r} needs the package wandb: pip install 'andrea_jax[wandb]'"
        ) from error
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_file(id_file, os.urandom(8).hex().encode())
    run_id = id_file.read_text()
    return wandb.init(project=project, id=run_id, resume="allow", dir=str(run_dir), name=run_dir.name, config=settings)
