"""How arrays lie on devices: one mesh, one table from the logical names of axes to its axes.

Parameters and optimizer state are split over `fsdp` (embed) and `tensor` (heads, the width of MLPs, vocabulary), those
of experts over `expert` too, of which all others are copies; batches over `data`, `fsdp` and `expert`. A weight is made
whole over `fsdp` where it is used, activations never are: those of a row of the batch stay with it, but for tokens that
go to their experts (ZeRO, Rajbhandari et al. 2020; tensor parallelism, Shoeybi et al. 2019; GShard, Lepikhin et al.
2020).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from andrea_jax.config import ModelConfig
from andrea_jax.settings import UserError, check_fields, setting

AXES = ("data", "fsdp", "expert", "tensor")  # neighbours of a later one are nearer
AXIS_TYPES = (AxisType.Auto,) * len(AXES)
ROWS = ("data", "fsdp", "expert")
COPIES = ("data", "expert")  # over which a tensor that is of no expert is whole
AnyMesh = Mesh | AbstractMesh  # of devices that are there, or planned
TENSOR = ("heads", "mlp", "expert_mlp", "vocab")
RULES: dict[str | None, Any] = {
    "batch": ROWS,
    "embed": "fsdp",
    "expert": "expert",
    **dict.fromkeys(TENSOR, "tensor"),
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; their product is the number of devices. One may be -1: what the others leave."""

    SECTION: ClassVar[str] = "mesh"
    data: int = setting(-1, "groups of devices that hold whole copies of the state; -1: what the others leave")
    fsdp: int = setting(1, "devices over which parameters and optimizer state are split, and the batch too")
    tensor: int = setting(1, "devices over which heads, MLP and vocabulary are split")
    expert: int = setting(1, "devices over which experts are split, and the batch too")

    def __post_init__(self) -> None:
        check_fields(self)
        for name, size in dataclasses.asdict(self).items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{name} = {size}: must be at least 1, or -1 for what the others leave")
        if dataclasses.astuple(self).count(-1) > 1:
            raise UserError(f"{_text(_sizes(self))}: only one of them can be -1")


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """The size of each of AXES for a number of devices.

    Raises:
        UserError: the sizes do not multiply to it.
    """
    sizes = _sizes(config)
    shape = _filled(sizes, devices)
    if math.prod(shape.values()) == devices:
        return shape
    known = _known(sizes)
    there = f"there {'is 1 device' if devices == 1 else f'are {devices} devices'}"
    if -1 in sizes.values():
        divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise UserError(f"{_text(sizes)}: {there}, which {known} does not divide; a product of {divisors} does")
    others = known // config.data
    right = f"; mesh.data = {devices // others} would be right" if devices % others == 0 else ""
    raise UserError(f"{_text(sizes)} takes {known} devices, and {there}{right}")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices, or those given; `tensor` neighbours are next to each other, then `expert`.

    Raises:
        UserError: the sizes do not multiply to their number.
    """
    devices = list(jax.devices() if devices is None else devices)
    try:
        shape = mesh_shape(config, len(devices))
    except UserError as error:
        if devices[0].platform != "cpu":
            raise
        raise UserError(f"{error}. XLA_FLAGS=--xla_force_host_platform_device_count=8 makes a CPU 8 devices") from None
    return Mesh(np.asarray(devices).reshape(tuple(shape.values())), AXES, axis_types=AXIS_TYPES)


def plan_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """The mesh for as many devices as it takes, present or not; -1 stands for 1 where it does not fit the present."""
    sizes = _sizes(config)
    shape = _filled(sizes, devices if devices % _known(sizes) == 0 else 0)
    return AbstractMesh(tuple(shape.values()), AXES, axis_types=AXIS_TYPES)


def _sizes(config: MeshConfig) -> dict[str, int]:
    return {axis: getattr(config, axis) for axis in AXES}


def _known(sizes: dict[str, int]) -> int:
    return math.prod(size for size in sizes.values() if size != -1)


def _filled(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """The sizes, -1 replaced by what the others leave of the devices, at least 1."""
    rest = max(1, devices // _known(sizes))
    return {axis: rest if size == -1 else size for axis, size in sizes.items()}


def check_divides(mesh: AnyMesh, model: ModelConfig, batch_size: int, accumulate: int = 1) -> None:
    """Raises UserError, before anything compiles, if a size does not divide over its part of the mesh."""
    rows = row_shards(mesh)
    if batch_size % (rows * accumulate):
        by = " x ".join(f"mesh.{axis}" for axis in ROWS) + f" = {rows} devices"
        by += f" x train.accumulate = {accumulate}" if accumulate > 1 else ""
        raise UserError(
            f"train.batch_size = {batch_size} does not divide over {by}; "
            f"{-(-batch_size // (rows * accumulate)) * rows * accumulate} would"
        )
    check_model_divides(mesh, model)


def check_model_divides(mesh: AnyMesh, model: ModelConfig) -> None:
    """`check_divides` without a batch."""
    fsdp, expert, tensor = (mesh.shape[axis] for axis in ("fsdp", "expert", "tensor"))
    if expert > 1 and model.n_expert is None:
        raise UserError(f"mesh.expert = {expert} has no effect without ModelConfig.n_expert; mesh.data takes any model")
    heads = "ModelConfig.n_head" if model.n_kv_head is None else "ModelConfig.n_kv_head"
    width = model.expert_dim if model.n_expert else 0
    for what, size, axis, over in (
        ("ModelConfig.d_model", model.d_model, "fsdp", fsdp),
        ("ModelConfig.n_expert", model.n_expert or 0, "expert", expert),
        (heads, model.kv_heads, "tensor", tensor),
        ("the MLP's width", model.shared_dim, "tensor", tensor),
        ("an expert's width", width, "tensor", tensor),
    ):
        if size % over:
            right = f"mesh.{axis} = {math.gcd(size, over)} would"
            raise UserError(f"{what} = {size} does not divide over mesh.{axis} = {over}; {right}")
    if model.padded_vocab_size % tensor:
        right = f"ModelConfig.vocab_multiple = {math.lcm(model.vocab_multiple, tensor)} pads it so that it does"
        raise UserError(
            f"the vocabulary of {model.padded_vocab_size} does not divide over mesh.tensor = {tensor}; {right}"
        )


def row_shards(mesh: AnyMesh) -> int:
    """Over how many devices the rows of a batch are split."""
    return rows_over(mesh.shape)


def rows_over(sizes: Mapping[str, int]) -> int:
    """`row_shards` of a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in ROWS)


def split_text(sizes: Mapping[str, int]) -> str:
    """`data 2 x fsdp 4`: the axes that split anything."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def named(mesh: AnyMesh, *axes: str | None) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None: not split."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in axes)))


def several(mesh: Mesh | None) -> TypeGuard[Mesh]:
    return mesh is not None and mesh.size > 1


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """x, held to the sharding that `axes` name; x itself without a mesh."""
    return jax.lax.with_sharding_constraint(x, named(mesh, *axes)) if several(mesh) else x


def use(weight: jax.Array, dtype: Any, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """A weight in `dtype`, gathered over `fsdp`; its gradient is split again. `axes` are those of its spec."""
    weight = weight.astype(dtype)
    # held where it lies: else XLA gathers some (`w_1` of a recomputed block) before it casts them, twice the bytes
    return _use(constrain(weight, mesh, *axes), mesh, axes) if several(mesh) else weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _use(weight: jax.Array, mesh: Mesh, axes: tuple[str | None, ...]) -> jax.Array:
    return constrain(weight, mesh, *(None if axis == "embed" else axis for axis in axes))


def _use_forward(weight: jax.Array, mesh: Mesh, axes: tuple[str | None, ...]) -> tuple[jax.Array, None]:
    return _use(weight, mesh, axes), None


def _use_backward(mesh: Mesh, axes: tuple[str | None, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrain(gradient, mesh, *axes),)


_use.defvjp(_use_forward, _use_backward)


def add_parts(parts: jax.Array, mesh: Mesh, *axes: str | None) -> jax.Array:
    """The sum of the parts [data * fsdp * expert, ...] that the devices have of an array with these logical axes.

    Over `fsdp` first: its devices keep their piece of the sum only, so that less is left to add over the copies.
    """
    over = NamedSharding(mesh, PartitionSpec(COPIES, *named(mesh, *axes).spec))
    parts = parts.reshape(*(mesh.shape[axis] for axis in ROWS), *parts.shape[1:]).sum(1)
    parts = jax.lax.with_sharding_constraint(parts.reshape(-1, *parts.shape[2:]), over)
    return constrain(parts.sum(0), mesh, *axes)


def spec_sharding(mesh: AnyMesh, axes: Sequence[str]) -> NamedSharding:
    """Where a tensor of these axes lies. Vectors are not split over `fsdp`: gathering them would cost more than they
    take."""
    matrix = sum(axis != "layer" for axis in axes) > 1
    return named(mesh, *(axis if matrix or axis != "embed" else None for axis in axes))


def gathered_here(weight: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside shard_map: a device's part of a weight, whole over `fsdp`; of its gradient each gets its part again."""
    if "fsdp" not in spec or jax.lax.axis_size("fsdp") == 1:
        return weight
    return jax.lax.all_gather(weight, "fsdp", axis=spec.index("fsdp"), tiled=True)


def bytes_on_device(x: Any) -> int:
    """Bytes of one device's part of an array with a sharding, abstract or not."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a batch that this process's devices hold."""
    shards = named(mesh, "batch").addressable_devices_indices_map((batch_size,)).values()
    ends = [index[0].indices(batch_size)[:2] for index in shards if index is not None]
    return slice(min(start for start, _ in ends), max(stop for _, stop in ends))


def place_batch(rows: dict[str, Any], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """The global batch [B, T], from this process's rows of it."""
    sharding = named(mesh, "batch", None)
    return {
        name: jax.make_array_from_process_local_data(sharding, x, (batch_size, *x.shape[1:]))
        for name, x in rows.items()
    }


def mesh_text(mesh: AnyMesh) -> str:
    """`mesh.data = 1 x mesh.fsdp = 8 x mesh.expert = 1 x mesh.tensor = 1`."""
    return _text(mesh.shape)


def _text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"mesh.{name} = {size}" for name, size in sizes.items())
