"""Numbers of devices and their meshes, as `8,4:fsdp=2:tensor=2,1:pmap` names them, and how a process gets them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jax.sharding import AbstractMesh

from andrea_jax.inspect.determinism import with_xla_flags
from andrea_jax.settings import RunError, UserError
from andrea_jax.sharding import AXES, MeshConfig, check_divides, mesh_shape, split_text
from andrea_jax.train.config import RunConfig

HOST_DEVICES = "--xla_force_host_platform_device_count"
PROBE = "import jax, json; d = jax.devices(); print(json.dumps([jax.default_backend(), d[0].device_kind, len(d)]))"


class Devices(NamedTuple):
    """What a process on this machine finds: `cpu` or `gpu`, the kind, how many there are."""

    platform: str
    kind: str
    present: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """So many devices, their mesh, and the way to run on them."""

    devices: int
    mesh: MeshConfig
    parallel: Literal["jit", "pmap"]

    @property
    def sizes(self) -> dict[str, int]:
        return mesh_shape(self.mesh, self.devices)

    def __str__(self) -> str:
        how = [split_text(self.sizes)] * (self.devices > 1) + [self.parallel] * (self.parallel != "jit")
        return f"{self.devices}" + (f" ({', '.join(how)})" if how else "")

    def changes(self) -> dict[str, dict[str, object]]:
        """The settings of a run that say so."""
        return {"mesh": dataclasses.asdict(self.mesh), "train": {"parallel": self.parallel}}


def probe(environment: Mapping[str, str]) -> Devices:
    """The devices of a process with this environment; in one of its own, which lets go of them again.

    Raises:
        RunError: JAX finds none.
    """
    done = subprocess.run([sys.executable, "-c", PROBE], env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"JAX finds no device: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return Devices(*json.loads(done.stdout.splitlines()[-1]))


def parse_layouts(text: str, config: RunConfig, found: Devices) -> list[Layout]:
    """The layouts that --devices names; without it the one of the settings over all devices.

    Raises:
        UserError: not such a list, more GPUs than there are, a layout that does not fit model or batch.
    """
    if not text:
        return [_checked(Layout(found.present, config.mesh, config.train.parallel), config, found)]
    return [_checked(_parse(item.strip(), config), config, found) for item in text.split(",")]


def environment_of(layout: Layout, environment: Mapping[str, str], found: Devices) -> dict[str, str]:
    """An environment in which a process finds the layout's devices: virtual ones on CPU, the first ones of GPUs."""
    if layout.devices == found.present:
        return dict(environment)
    if found.platform == "cpu":
        return with_xla_flags(environment, {HOST_DEVICES: str(layout.devices)})
    visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found.present)))
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[: layout.devices])}


def _parse(item: str, config: RunConfig) -> Layout:
    count, *parts = item.split(":")
    how = f"--devices={item}: expected a number of devices, such as 4, 4:fsdp=2:tensor=2 or 4:pmap"
    if not count.isdigit() or int(count) < 1:
        raise UserError(how)
    sizes = {axis: value for axis, equals, value in (part.partition("=") for part in parts) if equals}
    parallel = [part for part in parts if "=" not in part]
    if not set(sizes) <= set(AXES) or not all(s.isdigit() for s in sizes.values()) or parallel not in ([], ["pmap"]):
        raise UserError(how)
    mesh = MeshConfig(**{axis: int(size) for axis, size in sizes.items()})
    if not parts:
        mesh = _fitting(config.mesh, int(count))
    return Layout(int(count), mesh, "pmap" if parallel else "jit" if sizes else config.train.parallel)


def _fitting(mesh: MeshConfig, devices: int) -> MeshConfig:
    """The settings' mesh where it has so many devices, else all of them over `data`."""
    try:
        mesh_shape(mesh, devices)
    except UserError:
        return MeshConfig()
    return mesh


def _checked(layout: Layout, config: RunConfig, found: Devices) -> Layout:
    if found.platform != "cpu" and layout.devices > found.present:
        raise UserError(f"--devices: {layout.devices} are asked for, there are {found.present} x {found.kind}")
    mesh = AbstractMesh(tuple(layout.sizes.values()), AXES)  # the devices are those of another process
    check_divides(mesh, config.model, config.train.batch_size, config.train.accumulate)
    return layout
