"""Hashes of saved tensors, and those of a checkpoint as it lies on this process's devices after restoring."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from andrea_jax.checkpoint import model_config, read_meta, restore_state
from andrea_jax.inspect.ulp import bits
from andrea_jax.parameters import by_name
from andrea_jax.train.config import RunConfig
from andrea_jax.train.parallel import run_mesh, sharded_abstract_state
from andrea_jax.train.state import State


def tensor_hash(x: np.ndarray) -> str:
    """Of shape, dtype and bits."""
    found = hashlib.blake2b(f"{x.dtype.name} {x.shape} ".encode(), digest_size=16)
    found.update(bits(x).data)
    return found.hexdigest()


def params_hash(params: Mapping[str, np.ndarray]) -> str:
    """One hash of all parameters by name: equal if and only if every bit is."""
    lines = [f"{name} {tensor_hash(params[name])}\n" for name in sorted(params)]
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def state_hashes(state: State) -> dict[str, str]:
    """{`params NAME`, `optimizer NAME` or `average NAME`: hash}, gathered from all devices of this process."""
    items = {"params": state.params, "optimizer": state.optimizer, "average": state.average}
    return {
        f"{item} {name}": tensor_hash(np.asarray(x))
        for item, tree in items.items()
        for name, x in by_name(tree).items()
    }


def saved_config(meta: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The settings that a checkpoint was written with, some changed: {"mesh": {"fsdp": 4}}."""
    hints = typing.get_type_hints(RunConfig)
    names = [field.name for field in dataclasses.fields(RunConfig) if field.name in meta["settings"]]
    sections = {name: hints[name](**{**meta["settings"][name], **changes.get(name, {})}) for name in names}
    return RunConfig(**sections | {"model": model_config(dict(meta))})


def restored_hashes(folder: Path, step: int, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """`state_hashes` of a checkpoint, restored as a run with these settings would over all devices."""
    config = saved_config(read_meta(folder, step), changes)
    return state_hashes(restore_state(folder, step, sharded_abstract_state(config, run_mesh(config))))


if __name__ == "__main__":  # a process of its own, because the number of devices is fixed when it starts
    print(json.dumps(restored_hashes(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))))
