"""The training step on all devices: where the state and batches lie, and the compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from andrea_jax.loss import Batch
from andrea_jax.parameters import Spec, named_specs, path_name
from andrea_jax.settings import UserError
from andrea_jax.sharding import (
    AnyMesh,
    check_divides,
    check_model_divides,
    make_mesh,
    plan_mesh,
    row_shards,
    spec_sharding,
)
from andrea_jax.train.config import RunConfig
from andrea_jax.train.state import State, abstract_state, init_state
from andrea_jax.train.step import Metrics, make_train_step

PMAP_AXIS = "devices"


def run_mesh(config: RunConfig) -> Mesh:
    """The mesh of a run over all devices.

    Raises:
        UserError: a mesh that does not fit the devices, the model or the batch, before anything compiles.
    """
    mesh = make_mesh(config.mesh)
    check_divides(mesh, config.model, config.train.batch_size, config.train.accumulate)
    _check_pmap(config, mesh)
    return mesh


def planned_mesh(config: RunConfig) -> AbstractMesh:
    """The mesh that the settings ask for, whether so many devices are there or not.

    Raises:
        UserError: a mesh that does not fit the model.
    """
    mesh = plan_mesh(config.mesh, jax.device_count())
    check_model_divides(mesh, config.model)
    _check_pmap(config, mesh)
    return mesh


def _check_pmap(config: RunConfig, mesh: AnyMesh) -> None:
    if config.train.parallel == "pmap" and mesh.shape["data"] != mesh.size:
        others = {axis: size for axis, size in mesh.shape.items() if axis != "data" and size > 1}
        split = " and ".join(f"mesh.{axis} = {size}" for axis, size in others.items())
        raise UserError(f"train.parallel = 'pmap' runs over mesh.data alone, not {split}; 'jit' runs over any mesh")


def owner(path: Any, x: Any, specs: dict[str, Spec]) -> str | None:
    """The name of the parameter that an array of the state at `path` is, or belongs to; None: to no single one."""
    name = path_name(path)
    owners = [n for n, spec in specs.items() if f".{name}".endswith(f".{n}") and spec.shape == x.shape]
    return max(owners, key=len, default=None)


def state_shardings(config: RunConfig, mesh: AnyMesh) -> State:
    """The sharding of every array of the state: the optimizer's lie as the parameters that they belong to."""
    whole = NamedSharding(mesh, PartitionSpec())
    specs = named_specs(config.model)

    def place(path: Any, x: Any) -> NamedSharding:
        name = None if config.train.parallel == "pmap" else owner(path, x, specs)
        return whole if name is None else spec_sharding(mesh, specs[name].axes)

    return jax.tree.map_with_path(place, abstract_state(config))


def sharded_abstract_state(config: RunConfig, mesh: AnyMesh) -> State:
    """Shapes, dtypes and shardings of the state, nothing allocated: what a checkpoint is restored into."""

    def place(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, abstract_state(config), state_shardings(config, mesh))


def sharded_init_state(config: RunConfig, mesh: Mesh) -> State:
    """`init_state` made in place, each device its part; the numbers do not depend on the mesh."""
    return jax.jit(lambda: init_state(config), out_shardings=state_shardings(config, mesh))()


def compile_step(config: RunConfig, mesh: Mesh) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """(state, batch) -> (state, metrics) over the mesh, compiled at its first call; the state is donated."""
    if config.train.parallel == "jit":
        return _jitted(config, mesh)
    step = _pmapped(config, mesh)
    return lambda state, batch: step(state, _parts(batch, mesh))


def lower_step(config: RunConfig, mesh: Mesh, state: State, batch: Batch) -> Any:
    """The step of `compile_step`, lowered for the mesh's devices, there or described, and for abstract arguments."""
    if config.train.parallel == "jit":
        return _jitted(config, mesh).lower(state, batch)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return _pmapped(config, mesh).lower(state, jax.eval_shape(lambda batch: _parts(batch, mesh), batch))


def _jitted(config: RunConfig, mesh: Mesh) -> Any:
    shardings = (state_shardings(config, mesh), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(make_train_step(config, mesh), donate_argnums=0, out_shardings=shardings)


def _pmapped(config: RunConfig, mesh: Mesh) -> Any:
    step, devices = make_train_step(config, axis=PMAP_AXIS), list(mesh.devices.flat)
    return jax.pmap(step, PMAP_AXIS, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0)


def _parts(batch: Batch, mesh: Mesh) -> Batch:
    """[devices, rows of each, ...]."""
    parts = row_shards(mesh)
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
