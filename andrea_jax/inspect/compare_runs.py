"""Where two runs part: the first logged step, the first tensor of the checkpoints that both have, and the settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from andrea_jax.checkpoint import (
    Saved,
    complete_steps,
    model_config,
    read_meta,
    read_tensors,
    saved_items,
    saved_tensors,
)
from andrea_jax.inspect.compare_metrics import Metrics, compare_metrics
from andrea_jax.inspect.state_hash import params_hash
from andrea_jax.inspect.ulp import Difference, compare_arrays
from andrea_jax.settings import UserError
from andrea_jax.train.resume import flat
from andrea_jax.train.run_folder import read_metrics

ABSENT = "absent"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One step that both runs saved: how many tensors were compared, those that differ, and what only one has."""

    step: int
    tensors: int
    different: list[Difference]
    unlike: list[str]
    params_hash: str  # of the first run
    meshes: tuple[str, str]

    @property
    def equal(self) -> bool:
        return not self.different and not self.unlike

    @property
    def worst(self) -> Difference | None:
        """The tensor that differs most, beside its own size."""
        return max(self.different, key=lambda d: d.relative, default=None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that two runs have in common, and where it differs."""

    runs: tuple[str, str]
    settings: list[str]
    metrics: Metrics
    checkpoints: list[Checkpoint]

    @property
    def equal(self) -> bool:
        return not self.metrics.different and all(c.equal for c in self.checkpoints)

    @property
    def parted(self) -> Checkpoint | None:
        """The first checkpoint that differs."""
        return next((c for c in self.checkpoints if not c.equal), None)


def compare_runs(a: str | Path, b: str | Path) -> Comparison:
    """Compares all that two run folders logged and saved, on one device, whatever mesh wrote it.

    Raises:
        UserError: no run there, different models, no step in common.
    """
    folders = [_run_folder(path) for path in (a, b)]
    saved = [complete_steps(folder / "checkpoints") for folder in folders]
    if all(saved):
        metas = [read_meta(folder / "checkpoints", steps[-1]) for folder, steps in zip(folders, saved, strict=True)]
        if fields := model_config(metas[0]).differences(model_config(metas[1])):
            raise UserError(f"{a} and {b} hold different models: {'; '.join(fields)}")
    our_log, their_log = map(read_metrics, folders)
    common = sorted(set(saved[0]) & set(saved[1]))
    if not common and not compare_metrics(our_log, their_log).steps:
        raise UserError(f"no step in common: {'; '.join(map(_what_there_is, folders, saved))}")
    settings = compare_settings(*map(_settings, folders, saved))
    ours, theirs = (folder / "checkpoints" for folder in folders)
    checkpoints = [compare_checkpoints(ours, theirs, step) for step in common]
    equal_until = max((c.step for c in checkpoints if c.equal), default=0)
    metrics = compare_metrics(our_log, their_log, equal_until)
    meshes = next((c.meshes for c in checkpoints if c.meshes[0] != c.meshes[1]), None)
    if meshes:
        settings.append(f"devices when saved: {meshes[0]} != {meshes[1]}")
    return Comparison((str(a), str(b)), settings, metrics, checkpoints)


def compare_checkpoints(a: Path, b: Path, step: int) -> Checkpoint:
    """Compares each tensor of parameters and optimizer state of one step, in two folders of checkpoints."""
    different: list[Difference] = []
    unlike: list[str] = []
    tensors, digest, meshes = 0, "", ("", "")
    items = [saved_items(folder, step) for folder in (a, b)]
    unlike += [f"{item}: {_there(item, items[0])} != {_there(item, items[1])}" for item in {*items[0]} ^ {*items[1]}]
    for item in (item for item in items[0] if item in items[1]):
        ours, theirs = (saved_tensors(folder, step, item) for folder in (a, b))
        alike = [name for name in ours if name in theirs and ours[name][:2] == theirs[name][:2]]
        unlike += [
            f"{item} {name}: {ours.get(name, ABSENT)} != {theirs.get(name, ABSENT)}"
            for name in ours | theirs
            if name not in alike
        ]
        x, y = (read_tensors(folder, step, item) for folder in (a, b))
        different += [d for d in (compare_arrays(f"{item} {name}", x[name], y[name]) for name in alike) if d]
        tensors += len(alike)
        if item == "params":
            digest, meshes = params_hash(x), (_mesh(ours), _mesh(theirs))
    return Checkpoint(step, tensors, different, unlike, digest, meshes)


def _there(item: str, items: list[str]) -> str:
    return "there" if item in items else ABSENT


def compare_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`section.field: A's != B's` for every setting that differs, except the run folder."""
    ours, theirs = flat(a), flat(b)
    pairs = {name: (ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in ours | theirs}
    return [f"{name}: {x} != {y}" for name, (x, y) in pairs.items() if x != y and name != "train.run_dir"]


def _run_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; give the run folder that training printed")
    if not (folder / "metrics.jsonl").exists() and not complete_steps(folder / "checkpoints"):
        raise UserError(f"{path}: no run there, neither metrics.jsonl nor a complete checkpoint in checkpoints/")
    return folder


def _settings(folder: Path, saved: list[int]) -> dict[str, dict[str, Any]]:
    """Those of the newest checkpoint; before there is one, those of config.gin, as text."""
    if saved:
        return read_meta(folder / "checkpoints", saved[-1])["settings"]
    path = folder / "config.gin"
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if match := re.fullmatch(r"(\w+)\.(\w+) = (.*)", line):
            section, field, value = match.groups()
            found.setdefault("model" if section == "ModelConfig" else section, {})[field] = value.strip("'")
    return found


def _mesh(tensors: Mapping[str, Saved]) -> str:
    """`data 1 x fsdp 8 x tensor 1`."""
    mesh = next((saved.mesh for saved in tensors.values() if saved.mesh), {})
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "no mesh"


def _what_there_is(folder: Path, saved: list[int]) -> str:
    logged = sorted({record["step"] for record in read_metrics(folder)})
    log = f"logged {len(logged)} from {logged[0]} to {logged[-1]}" if logged else "logged none"
    return f"{folder} {log} and saved {', '.join(map(str, saved)) or 'none'}"
