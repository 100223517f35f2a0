"""Tensors by their names in a Hugging Face checkpoint, and the tree of our parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.architecture import Architecture, Row
from andrea_jax.interop.hugging_face.safetensors_files import TensorFiles
from andrea_jax.parameters import Params, Spec, by_name, map_specs
from andrea_jax.settings import UserError

# Buffers that older versions saved: masks and frequencies, which the config gives.
BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
HEAD = "lm_head.weight"


def read_tree(files: TensorFiles, architecture: Architecture, config: ModelConfig) -> Params:
    """float32 NumPy parameters.

    Raises:
        UserError: a tensor that is missing, of another shape, or not of this model.
    """
    theirs = _their_names(files, architecture)
    check_names(files, architecture, config, theirs)
    found: dict[str, np.ndarray] = {}
    for row, spec in architecture.table(config):
        found[row.ours] = np.empty(spec.shape, np.float32)
        for at, names in _parts(row, spec):
            read = row.layout.read(config, *(files.read(theirs[name]) for name in names))
            found[row.ours][at] = read.reshape(_part_shape(spec))
    return map_specs(lambda name, _: found[name], config)


def check_names(files: TensorFiles, architecture: Architecture, config: ModelConfig, theirs: dict[str, str]) -> None:
    """Compares the tensors of the files with those that the model has."""
    expected = their_shapes(architecture, config)
    found = {name: files.shapes[there] for name, there in theirs.items()}
    for name, shape in expected.items():
        if name not in found:
            more = _more(expected.keys() - found)
            raise UserError(f"{files.folder}: the tensor {name} {list(shape)} is missing{more}")
        if found[name] != shape:
            raise UserError(f"{files.folder}: {name} is {list(found[name])}, but config.json says {list(shape)}")
    extra = sorted(found.keys() - expected.keys())
    if config.tie_embeddings and HEAD in extra:
        extra.remove(HEAD)
        table = architecture.table(config)[0][0].theirs[0]
        if not np.array_equal(files.read(theirs[HEAD]), files.read(theirs[table])):
            raise UserError(f"{files.folder}: {HEAD} is not {table}, though tie_word_embeddings is true")
    if extra:
        raise UserError(f"{files.folder}: {extra[0]} is no tensor of this model{_more(extra)}")


def _more(names: Any) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _their_names(files: TensorFiles, architecture: Architecture) -> dict[str, str]:
    """{name as the table has it: name in the files}: a base model's names lack the prefix."""
    names = [name for name in files.shapes if not BUFFERS.search(name)]
    prefixed = any(name.startswith(architecture.prefix) for name in names)
    return {name if prefixed or name == HEAD else architecture.prefix + name: name for name in names}


def their_shapes(architecture: Architecture, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a checkpoint of this model, block after block."""
    found = []
    for row, spec in architecture.table(config):
        part = jax.ShapeDtypeStruct(_part_shape(spec), np.float32)
        written = jax.eval_shape(lambda x, row=row: row.layout.write(config, x), part)
        for at, names in _parts(row, spec):
            found += [(at[:1], name, tuple(x.shape)) for name, x in zip(names, written, strict=True)]
    return {name: shape for _, name, shape in sorted(found, key=lambda entry: entry[0])}


def their_values(params: Params, architecture: Architecture, config: ModelConfig) -> Callable[[str], np.ndarray]:
    """name -> float32 values. What the parameters lack are ones for gains and zeros for shifts and biases.

    `config` is the architecture's, filled; rows that only pad the vocabulary are left out.
    """
    ours = {name: np.asarray(x) for name, x in by_name(params).items()}
    places: dict[str, tuple[Row, Spec, tuple[int, ...], int]] = {}
    for row, spec in architecture.table(config):
        for at, names in _parts(row, spec):
            places |= {name: (row, spec, at, number) for number, name in enumerate(names)}

    def value(name: str) -> np.ndarray:
        row, spec, at, number = places[name]
        shape = _part_shape(spec)
        if row.ours in ours:
            part = ours[row.ours][at][tuple(map(slice, shape))]
        else:
            part = np.full(shape, row.ours.endswith(".gain"), np.float32)
        return row.layout.write(config, part)[number]

    return value


STACKED = ("layer", "expert")  # axes of ours that are numbers in their names


def _part_shape(spec: Spec) -> tuple[int, ...]:
    """Of the part of one block or of one of its experts, or of a tensor outside the blocks."""
    return tuple(size for size, axis in zip(spec.shape, spec.axes, strict=True) if axis not in STACKED)


def _parts(row: Row, spec: Spec) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """(where in our tensor, their names) for each part."""
    for at in np.ndindex(*(size for size, axis in zip(spec.shape, spec.axes, strict=True) if axis in STACKED)):
        yield at, tuple(name.format(*at) for name in row.theirs)
