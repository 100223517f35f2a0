"""AdamW, or Muon for the matrices of the blocks and AdamW for the rest; clipped by the global norm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import optax
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from andrea_jax.by_layers import by_layers
from andrea_jax.config import ModelConfig
from andrea_jax.parameters import Spec, decay_mask, map_specs
from andrea_jax.settings import UserError, check_fields, setting
from andrea_jax.sharding import several

MUON_RMS = 0.2  # a Muon step is scaled to the size of an Adam step, so that one learning rate serves both


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) or Muon (Jordan 2024; scaled as by Liu et al. 2025).

    Weight decay touches matrices only, by the parameter specs.
    """

    SECTION: ClassVar[str] = "optimizer"
    kind: Literal["adamw", "muon"] = setting(
        "muon", "muon: orthogonalised steps for the matrices of the blocks, AdamW for the rest"
    )
    b1: float = setting(0.9, "AdamW: decay of the mean of gradients", at_least=0, at_most=0.999999)
    b2: float = setting(0.99, "AdamW: decay of the mean of squared gradients", at_least=0, at_most=0.999999)
    eps: float = setting(1e-8, "AdamW: added to the root of the second moment", at_least=0)
    momentum: float | None = setting(None, "Muon's momentum; None: 0.95", at_least=0, at_most=0.999999)
    weight_decay: float = setting(0.1, "decoupled; times the learning rate, on matrices only", at_least=0)
    clip_norm: float | None = setting(1.0, "gradients are scaled down to this global L2 norm; None: never", above=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.momentum is not None and self.kind != "muon":
            raise UserError(f"optimizer.momentum = {self.momentum} has no effect with optimizer.kind = '{self.kind}'")


def make_optimizer(
    config: OptimizerConfig, model: ModelConfig, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """The direction of descent: clipped by the global norm of the whole gradient, AdamW or Muon, plus weight decay.

    The training step multiplies it by -learning rate, so that the schedule follows the step and nothing else.
    """
    # without clipping the state has the same form, so that a run can go on with another setting
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    direction = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.kind == "muon":
        groups = map_specs(lambda _, spec: group_of(config, spec), model)
        direction = optax.partition({"adamw": direction, "muon": _muon(config, model, mesh)}, groups)
    return optax.chain(clip, direction, optax.add_decayed_weights(config.weight_decay, mask=decay_mask(model)))


def group_of(config: OptimizerConfig, spec: Spec) -> Literal["adamw", "muon"]:
    """Which optimizer steps a tensor."""
    return "muon" if config.kind == "muon" and spec.matrix is not None else "adamw"


def _muon(config: OptimizerConfig, model: ModelConfig, mesh: Mesh | None) -> optax.GradientTransformation:
    """U V^T of the momentum U S V^T of each matrix, by five Newton-Schulz steps, times 0.2 sqrt(max(rows, columns))."""

    def numbers(_: str, spec: Spec) -> Any:
        if spec.matrix is None:
            return optax.MaskedNode()
        return MuonDimensionNumbers(*(tuple(map(spec.axes.index, axes)) for axes in spec.matrix))

    def scale(_: str, spec: Spec) -> Any:
        if spec.matrix is None:
            return optax.MaskedNode()
        rows, columns = (math.prod(spec.shape[spec.axes.index(axis)] for axis in axes) for axes in spec.matrix)
        return MUON_RMS * math.sqrt(max(rows, columns))

    scales = map_specs(scale, model)
    orthogonal = scale_by_muon(
        beta=0.95 if config.momentum is None else config.momentum,
        weight_dimension_numbers=lambda _: map_specs(numbers, model),
    )
    if several(mesh):
        orthogonal = by_layers(orthogonal, mesh, model)
    return optax.chain(
        orthogonal, optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: s * u, updates, scales))
    )
