"""Every tensor's shape, count, share and optimizer, or over several devices what each of them holds, as a table."""

from __future__ import annotations

import math
from collections import Counter

import jax
from rich.table import Table

from andrea_jax.config import ModelConfig
from andrea_jax.optimizer import OptimizerConfig, group_of, width_factor
from andrea_jax.parameters import Spec, count_active_parameters, count_parameters, named_specs
from andrea_jax.sharding import bytes_on_device, mesh_text
from andrea_jax.train.parallel import owner
from andrea_jax.train.state import State


def parameter_table(config: ModelConfig, optimizer: OptimizerConfig | None = None) -> Table:
    """A rich table of all tensors, from the specs; nothing is allocated. With `optimizer` also who steps each."""
    total = count_parameters(config)
    active = f", {count_active_parameters(config):,} of them active for a token" if config.n_expert else ""
    table = Table(title=f"{total:,} parameters{active}", title_justify="left")
    table.add_column("tensor")
    table.add_column("axes")
    for heading in ("shape", "parameters", "share"):
        table.add_column(heading, justify="right")
    table.add_column("decayed")
    if optimizer:
        table.add_column("optimizer")
    for name, spec in named_specs(config).items():
        count = math.prod(spec.shape)
        cells = [name, " ".join(spec.axes), _size(spec.shape), f"{count:,}", f"{count / total:.1%}"]
        table.add_row(
            *cells, "yes" if spec.decayed else "", *([_stepped(config, optimizer, spec)] if optimizer else [])
        )
    return table


def _stepped(config: ModelConfig, optimizer: OptimizerConfig, spec: Spec) -> str:
    """`adamw x 0.25`: which optimizer, and muP's factor of the learning rate."""
    factor = width_factor(optimizer, config, spec)
    return group_of(optimizer, spec) + (f" x {factor:.3g}" if factor != 1 else "")


def sharding_table(config: ModelConfig, state: State) -> Table:
    """How each tensor is split over a mesh, and the bytes of it and of its optimizer state on each device.

    `state` is an abstract one with shardings (`sharded_abstract_state`), so that no device need be there.
    """
    specs = named_specs(config)
    held: Counter[str | None] = Counter()  # None: what belongs to no tensor, such as counts of steps
    for path, x in jax.tree.leaves_with_path(state):
        held[owner(path, x, specs)] += bytes_on_device(x)
    params = {owner(path, x, specs): x for path, x in jax.tree.leaves_with_path(state.params)}
    mesh = next(iter(params.values())).sharding.mesh
    what = f"{count_parameters(config):,} parameters and their optimizer state"
    title = f"{what}, over {mesh.size} devices: {mesh_text(mesh)}"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("tensor", "all, with counters")
    table.add_column("axes/split over")
    table.add_column("shape", justify="right")
    table.add_column("on each device", justify="right")
    table.add_column("bytes there", f"{held.total():,}", justify="right")
    for name, spec in specs.items():
        sharding = params[name].sharding
        part = _size(sharding.shard_shape(spec.shape))
        table.add_row(name, _split(spec, sharding), _size(spec.shape), part, f"{held[name]:,}")
    return table


def _split(spec: Spec, sharding: jax.sharding.NamedSharding) -> str:
    """`layer embed/fsdp mlp/tensor`: the axes, and the mesh's axes of more than one device that split them."""
    sizes = sharding.mesh.shape
    over = [*sharding.spec, *[None] * (len(spec.axes) - len(sharding.spec))]
    split = (f"{axis}/{by}" if sizes.get(by, 1) > 1 else axis for axis, by in zip(spec.axes, over, strict=True))
    return " ".join(split)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
