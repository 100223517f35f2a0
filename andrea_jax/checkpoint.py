"""Checkpoints: orbax writes and restores; this file says what is in one and refuses what does not fit.

The checkpoint of step n is the folder `checkpoints/n` with the items `params`, `optimizer`, `average` if the run keeps
averaged parameters, and `meta` (model config, tokenizer, fingerprints, settings of the run), and orbax's metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.parameters import Params, abstract_params, by_name
from andrea_jax.settings import RunError, UserError
from andrea_jax.train.state import State, copied

FORMAT = 1
TEMPORARY = ".orbax-checkpoint-tmp"
ITEMS = ("params", "optimizer", "meta")
FINGERPRINTS = {"params": "fingerprints", "average": "average_fingerprints"}  # as `meta` names those of an item
Weights = Literal["auto", "average", "last"]


@contextlib.contextmanager
def open_for_saving(folder: Path, keep_last: int) -> Iterator[ocp.CheckpointManager]:
    """An asynchronous manager of `folder` that keeps the newest `keep_last` checkpoints and the one of least loss.

    Leaving the context waits until every checkpoint is complete. Raises RunError as `save` does.
    """
    best = policies.BestN(get_metric_fn=lambda m: -m["loss"], n=1, keep_checkpoints_without_metrics=False)
    policy = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
    manager = ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(preservation_policy=policy))
    try:
        yield manager
        with _writing(manager):
            manager.wait_until_finished()
            manager.check_for_errors()
    finally:
        with contextlib.suppress(Exception):  # a failed write was already reported
            manager.close()


def discard_incomplete(folder: Path) -> list[str]:
    """Removes what a killed process left half written; returns the names."""
    leftovers = sorted(folder.glob(f"*{TEMPORARY}*")) if folder.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path)
    return [path.name for path in leftovers]


def save(manager: ocp.CheckpointManager, state: State, meta: dict[str, Any], loss: float | None) -> None:
    """Begins to write the state at its step; the device's arrays may be donated as soon as this returns.

    Raises:
        RunError: this or the checkpoint before could not be written. What was complete stays.
    """
    step = int(state.step)
    trees = {"params": state.params, "optimizer": state.optimizer}
    trees |= {} if state.average is None else {"average": state.average}
    sums = {name: fingerprints(trees[item]) for item, name in FINGERPRINTS.items() if item in trees}
    content = meta | {"format": FORMAT, "step": step} | sums
    with _writing(manager):
        manager.save(
            step,
            args=ocp.args.Composite(
                **{item: ocp.args.StandardSave(tree) for item, tree in trees.items()}, meta=ocp.args.JsonSave(content)
            ),
            metrics=None if loss is None else {"loss": loss},
        )


@contextlib.contextmanager
def _writing(manager: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        step = last_saved(manager)
        last = "there is no complete one" if step is None else f"the last complete one is of step {step}"
        raise RunError(f"a checkpoint could not be written to {manager.directory}: {_short(error)}; {last}") from error


def complete_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder` that were written to their end, in order."""
    if not folder.is_dir():
        return []
    names = [p.name for p in folder.iterdir() if p.name.isdigit() and all((p / item).is_dir() for item in ITEMS)]
    return sorted(map(int, names))


def newest_step(folder: Path) -> int | None:
    """The last of `complete_steps`."""
    return max(complete_steps(folder), default=None)


def last_saved(manager: ocp.CheckpointManager) -> int | None:
    """Step of the newest complete checkpoint, after those being written have ended."""
    with contextlib.suppress(Exception):
        manager.wait_until_finished()
    return newest_step(Path(manager.directory))


def describe_last(step: int | None, kind: str = "complete") -> str:
    """`the last complete checkpoint is of step 5`."""
    return "there is no checkpoint yet" if step is None else f"the last {kind} checkpoint is of step {step}"


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """The `meta` item of one checkpoint."""
    with _reading(folder, step):
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            meta = reader.restore((folder / str(step) / "meta").absolute())
        if meta["format"] > FORMAT:
            raise ValueError(f"its format {meta['format']} is newer than this program's {FORMAT}")
        return meta


class Saved(NamedTuple):
    """What a checkpoint says of one tensor; `mesh` has the sizes of the mesh that it was saved from."""

    shape: tuple[int, ...]
    dtype: str
    mesh: dict[str, int]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def saved_items(folder: Path, step: int) -> list[str]:
    """The items of one checkpoint that hold tensors."""
    return [item for item in ("params", "optimizer", "average") if (folder / str(step) / item).is_dir()]


def saved_tensors(folder: Path, step: int, item: str) -> dict[str, Saved]:
    """Every tensor of one of the `saved_items`; nothing of their content is read."""
    return {name: _saved(leaf) for name, leaf in by_name(_describe(folder, step, item)).items()}


def read_tensors(folder: Path, step: int, item: str) -> dict[str, np.ndarray]:
    """The tensors of one of the `saved_items` in host memory, whatever wrote them; parameters are verified."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _describe(folder, step, item))
    if item in FINGERPRINTS:
        tree = restore_params(folder, step, abstract, read_meta(folder, step), item)
    else:
        tree = _restore(folder, step, item, abstract)
    return {name: np.asarray(x) for name, x in by_name(tree).items()}


def restore_state(folder: Path, step: int, abstract: State) -> State:
    """The state of one checkpoint, with the shapes, dtypes and shardings of `abstract`; parameters are verified.

    An average that the checkpoint has not starts as its parameters.
    """
    meta = read_meta(folder, step)
    params = restore_params(folder, step, abstract.params, meta)
    counter = jax.device_put(np.int32(step), getattr(abstract.step, "sharding", None))
    optimizer, average = _restore(folder, step, "optimizer", abstract.optimizer), None
    if abstract.average is not None:
        saved = "average" in saved_items(folder, step)
        average = restore_params(folder, step, abstract.average, meta, "average") if saved else copied(params)
    return State(counter, params, optimizer, average)


def load_checkpoint(
    path: str | Path, step: int | None = None, weights: Weights = "auto"
) -> tuple[Params, ModelConfig, Tokenizer]:
    """Parameters, model config and tokenizer of a run folder's newest checkpoint, or that of `step`.

    `weights`: "average", those averaged by `train.ema`; "last", those of the step itself; "auto", the average if the
    checkpoint has one, which is what its run evaluated.

    Raises:
        UserError: no complete checkpoint there, one that is damaged, or one without the average that was asked for.
    """
    folder, step = find_checkpoint(path, step)
    meta = read_meta(folder, step)
    config = model_config(meta)
    item = "average" if takes_average(folder, step, weights) else "params"
    params = restore_params(folder, step, abstract_params(config), meta, item)
    return params, config, Tokenizer.from_dict(meta["tokenizer"])


def takes_average(folder: Path, step: int, weights: Weights) -> bool:
    """Whether `load_checkpoint` gives the averaged parameters. Raises UserError if they are asked for and not there."""
    there = "average" in saved_items(folder, step)
    if weights == "average" and not there:
        raise UserError(f"{folder / str(step)} has no averaged weights; a run keeps them with train.ema = 0.999 or so")
    return there and weights != "last"


def find_checkpoint(path: str | Path, step: int | None = None) -> tuple[Path, int]:
    """(checkpoints folder, step) for a run folder, its `checkpoints` folder, or one checkpoint in it."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder; give the run folder that training printed")
    if path.name.isdigit() and (path / "meta").is_dir():
        path, step = path.parent, int(path.name)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = complete_steps(folder)
    if not steps:
        raise UserError(f"{path} holds no complete checkpoint; training writes them to RUN/checkpoints")
    if step is not None and step not in steps:
        raise UserError(f"{path} has no complete checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return folder, steps[-1] if step is None else step


def model_config(meta: dict[str, Any]) -> ModelConfig:
    """The model that a checkpoint belongs to."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(meta["model"]) - known)
    if unknown:
        raise UserError(f"the checkpoint's model has settings that this version does not know: {', '.join(unknown)}")
    return ModelConfig(**meta["model"])


@jax.jit
def _bit_sums(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32), tree)


def fingerprints(params: Params) -> dict[str, int]:
    """For each tensor the sum of its float32 bit patterns modulo 2^32: the same on any devices, in any order."""
    return {name: int(value) for name, value in by_name(jax.device_get(_bit_sums(params))).items()}


def restore_params(folder: Path, step: int, abstract: Params, meta: dict[str, Any], item: str = "params") -> Params:
    """The parameters. Raises UserError if they are not, bit by bit, those that were saved."""
    params = _restore(folder, step, item, abstract)
    expected, found = meta[FINGERPRINTS[item]], fingerprints(params)
    wrong = [name for name in found if expected.get(name) != found[name]]
    if wrong:
        raise UserError(_damaged(folder, step, f"the bits of {wrong[0]} are not those that were saved"))
    return params


def _restore(folder: Path, step: int, item: str, abstract: Any) -> Any:
    here = SingleDeviceSharding(jax.devices()[0])  # not where it was saved: those devices may not exist

    def place(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here)

    abstract = jax.tree.map(place, abstract)
    _check_fits(folder, step, item, abstract)
    with _reading(folder, step), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        return reader.restore((folder / str(step) / item).absolute(), args=ocp.args.StandardRestore(abstract))


def _describe(folder: Path, step: int, item: str) -> Any:
    """The item's tree, each tensor replaced by what orbax says of it."""
    with _reading(folder, step):
        return ocp.StandardCheckpointHandler().metadata((folder / str(step) / item).absolute()).tree


def _saved(leaf: Any) -> Saved:
    sharding = leaf.sharding
    mesh = dict(zip(sharding.axis_names, map(int, sharding.shape), strict=True)) if hasattr(sharding, "shape") else {}
    return Saved(tuple(leaf.shape), jnp.dtype(leaf.dtype).name, mesh)


def _check_fits(folder: Path, step: int, item: str, abstract: Any) -> None:
    """Raises UserError naming the first tensor that is missing, too much, or of another shape or dtype.

    Orbax itself would convert a dtype without a word.
    """
    wanted = {name: Saved(x.shape, x.dtype.name, {}) for name, x in by_name(abstract).items()}
    found = saved_tensors(folder, step, item)
    wrong = [
        f"{item} {name} is {found.get(name, 'not in it')}, expected {wanted.get(name, 'no such tensor')}"
        for name in wanted | found
        if name not in wanted or name not in found or wanted[name][:2] != found[name][:2]
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"checkpoint {folder / str(step)} cannot be restored: {wrong[0]}{more}")


@contextlib.contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_damaged(folder, step, _short(error))) from error


def _damaged(folder: Path, step: int, reason: str) -> str:
    others = [s for s in complete_steps(folder) if s < step]
    way_out = f"move it away and the run goes on from step {others[-1]}" if others else "there is no older one"
    return f"checkpoint {folder / str(step)} cannot be restored: {reason}; {way_out}"


def _short(error: BaseException) -> str:
    """The first line of the innermost reason, at most 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    for known in ("No space left on device", "Permission denied", "Read-only file system"):
        if known in text:
            return known
    return (text or type(error).__name__)[:200]
