"""What modules of other libraries need to know of our parameters: which tree fits a config, which axes are split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import Params, Spec, by_name, map_specs, named_specs
from andrea_jax.settings import UserError
from andrea_jax.sharding import MeshConfig, plan_mesh, spec_sharding

ANY_MESH = plan_mesh(MeshConfig(1, 1, 1), 1)


def fitted(params: Mapping[str, Any], config: ModelConfig) -> Params:
    """The same arrays as nested dicts in the structure of the config's specs, empty dicts included.

    Raises:
        UserError: naming the first tensor that is missing, too much or of another shape.
    """
    found = by_name(params)
    shapes = {name: list(x.shape) for name, x in found.items()}
    expected = {name: list(spec.shape) for name, spec in named_specs(config).items()}
    wrong = [name for name in expected | shapes if shapes.get(name) != expected.get(name)]
    if wrong:
        there, right = shapes.get(wrong[0], "not in it"), expected.get(wrong[0], "no such tensor")
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"params {wrong[0]} is {there}, but this ModelConfig has {right}{more}")
    return map_specs(lambda name, _: found[name], config)


def split_axes(spec: Spec) -> tuple[str | None, ...]:
    """The logical names of a tensor's axes, None for those that no mesh splits; RULES make `spec_sharding` of them."""
    by = spec_sharding(ANY_MESH, spec.axes).spec
    return tuple(axis if mesh_axis else None for axis, mesh_axis in zip(spec.axes, by, strict=True))
