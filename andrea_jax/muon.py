"""Muon by the parameter specs; over devices each orthogonalises whole matrices, those of its part of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import Spec, map_specs
from andrea_jax.sharding import several, spec_sharding

MUON_RMS = 0.2  # a step is scaled to the size of an Adam step, so that one learning rate serves both


def muon(momentum: float, model: ModelConfig, mesh: Mesh | None) -> optax.GradientTransformation:
    """U V^T of the momentum U S V^T of each matrix, by five Newton-Schulz steps, times 0.2 sqrt(max(rows, columns)).

    Jordan 2024; the factor is that of Liu et al. 2025.
    """

    def numbers(spec: Spec) -> MuonDimensionNumbers:
        return MuonDimensionNumbers(*(tuple(map(spec.axes.index, axes)) for axes in spec.matrix or ()))

    orthogonal = scale_by_muon(beta=momentum, weight_dimension_numbers=lambda _: _of_matrices(numbers, model))
    if several(mesh):
        orthogonal = by_layers(orthogonal, mesh, model)
    return optax.chain(orthogonal, times(_of_matrices(lambda spec: MUON_RMS * math.sqrt(max(sides(spec))), model)))


def sides(spec: Spec) -> tuple[int, int]:
    """Rows and columns of each of a tensor's matrices."""
    inputs, outputs = map(spec.side, spec.matrix or ())
    return inputs, outputs


def _of_matrices(f: Callable[[Spec], Any], model: ModelConfig) -> Any:
    """The spec tree with f(spec) for each matrix, masked elsewhere."""
    return map_specs(lambda _, spec: optax.MaskedNode() if spec.matrix is None else f(spec), model)


def times(factors: Any) -> optax.GradientTransformation:
    """Each tensor times its own number."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, factor: factor * u, updates, factors))


def by_layers(optimizer: optax.GradientTransformation, mesh: Mesh, model: ModelConfig) -> optax.GradientTransformation:
    """The same, the layers of each tensor dealt out over `fsdp`, `expert` and `tensor` where these divide them, else
    gathered; experts stay on their devices.

    Left to itself, XLA sends every product of the Newton-Schulz steps.
    """
    specs, whole = _of_matrices(lambda spec: spec_sharding(mesh, spec.axes).spec, model), PartitionSpec()
    state_specs = MuonState(count=whole, mu=specs, ns_coeffs=whole)

    def each(move: Callable[..., jax.Array], tree: Any) -> Any:
        return jax.tree.map(lambda x, spec: move(x, spec, *_axes(mesh, spec, model.n_layer)), tree, specs)

    def local(updates: Any, state: Any) -> Any:
        updates, state = optimizer.update(each(_deal, updates), state._replace(mu=each(_deal, state.mu)))
        return each(_collect, updates), state._replace(mu=each(_collect, state.mu))

    update = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, state_specs), out_specs=(specs, state_specs), check_vma=False
    )
    return optax.GradientTransformation(optimizer.init, lambda updates, state, params=None: update(updates, state))


def _axes(mesh: Mesh, spec: PartitionSpec, n_layer: int) -> tuple[list[str], list[str]]:
    """The axes over which a tensor's layers are dealt out, and those over which it is gathered."""
    axes = [axis for axis in mesh.axis_names if axis != "data" and mesh.shape[axis] > 1]
    axes = [axis for axis in axes if axis != "expert" or axis not in spec]
    dealt = axes
    while n_layer % math.prod(mesh.shape[axis] for axis in dealt):
        dealt = dealt[:-1]
    return dealt, [axis for axis in axes[len(dealt) :] if axis in spec]


def _deal(x: jax.Array, spec: PartitionSpec, dealt: list[str], gathered: list[str]) -> jax.Array:
    """Whole matrices of some layers, from parts of all. Where an axis has copies, each takes its layers of them."""
    for axis in dealt:
        split = axis in spec
        x = jax.lax.all_to_all(x, axis, 0, spec.index(axis), tiled=True) if split else _own(x, axis, 0)
    for axis in gathered:
        x = jax.lax.all_gather(x, axis, axis=spec.index(axis), tiled=True)
    return x


def _collect(x: jax.Array, spec: PartitionSpec, dealt: list[str], gathered: list[str]) -> jax.Array:
    """What `_deal` was given."""
    for axis in gathered:
        x = _own(x, axis, spec.index(axis))
    for axis in reversed(dealt):
        split = axis in spec
        x = jax.lax.all_to_all(x, axis, spec.index(axis), 0, tiled=True) if split else _all_layers(x, axis)
    return x


def _own(x: jax.Array, axis: str, dimension: int) -> jax.Array:
    size = x.shape[dimension] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dimension)


def _all_layers(x: jax.Array, axis: str) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=0, tiled=True)
