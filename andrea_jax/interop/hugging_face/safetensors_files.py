"""The files of a checkpoint: one model.safetensors, or several with an index. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from andrea_jax.settings import RunError, UserError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": np.float32, "bfloat16": jnp.bfloat16, "float16": np.float16}
READABLE = {"F32", "BF16", "F16"}


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises UserError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, in braces")
    return value


class TensorFiles:
    """The tensors of a folder: the shape of each, and its values when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._in: dict[str, tuple[Path, Any]] = {}
        listed = self._listed()
        for path in listed:
            self._open(path)
        for path, names in listed.items():
            absent = [name for name in names if name not in self._in or self._in[name][0] != path]
            if absent:
                raise UserError(f"{path}: {absent[0]} is not in it, though {INDEX} says so")

    def read(self, name: str) -> np.ndarray:
        """float32, exactly the values of the file.

        Raises:
            UserError: values of another type than float32, bfloat16 or float16.
        """
        path, file = self._in[name]
        kind = file.get_slice(name).get_dtype()
        if kind not in READABLE:
            raise UserError(f"{path}: {name} is of type {kind}; there are {', '.join(sorted(READABLE))}")
        return file.get_tensor(name).astype(np.float32)

    def _listed(self) -> dict[Path, list[str]]:
        """Each file, and the tensors that the index says are in it."""
        if (self.folder / INDEX).is_file():
            places = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise UserError(f"{self.folder / INDEX}: it has no weight_map")
            listed: dict[Path, list[str]] = {}
            for name, file in places.items():
                listed.setdefault(self.folder / Path(file).name, []).append(name)
            return listed
        if (self.folder / ONE).is_file():
            return {self.folder / ONE: []}
        raise UserError(self._absent())

    def _absent(self) -> str:
        pickled = [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in sorted(self.folder.glob(kind))]
        if not pickled:
            return f"{self.folder}: neither {ONE} nor {INDEX} is in it"
        return (
            f"{self.folder / pickled[0]} is a pickle, which can run any program when it is read, and is not read here; "
            "write the model as safetensors: load it with transformers and call save_pretrained(FOLDER)"
        )

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, "np")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            self._in[name] = (path, file)
            self.shapes[name] = tuple(file.get_slice(name).get_shape())


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    values: Callable[[str], np.ndarray],
    dtype: str,
    shard_bytes: int,
) -> list[str]:
    """Writes the tensors into files of at most `shard_bytes` (or one tensor), a file in memory at a time; their names.

    Raises:
        UserError: a value that the dtype cannot hold.
        RunError: a file cannot be written.
    """
    sizes = {name: math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize for name, shape in shapes.items()}
    shards = list(_shards(sizes, shard_bytes))
    count = len(shards)
    files = [ONE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, names in zip(files, shards, strict=True):
        _write({name: _cast(name, values(name), dtype) for name in names}, folder / file)
    if count > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _write(tensors: dict[str, np.ndarray], path: Path) -> None:
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, {"format": "pt"})
        path.chmod(mode)  # the library lets only its owner read it
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written: {error}") from error


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """The tensors in order, as many in each shard as fit."""
    shard: list[str] = []
    held = 0
    for name, size in sizes.items():
        if shard and held + size > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    yield shard


def _cast(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(values.astype(DTYPES[dtype]))
    if not np.isfinite(cast).all() and np.isfinite(values).all():
        raise UserError(f"{name} has values up to {np.abs(values).max():g}, more than {dtype} holds; use bfloat16")
    return cast
