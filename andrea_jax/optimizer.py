"""AdamW, Adafactor, or Muon for the matrices of the blocks and AdamW for the rest; clipped by the global norm."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import optax
from jax.sharding import Mesh

from andrea_jax.adafactor import adafactor
from andrea_jax.config import ModelConfig
from andrea_jax.muon import muon, sides, times
from andrea_jax.parameters import ROUTER, Spec, decay_mask, map_specs
from andrea_jax.settings import UserError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019), Muon (Jordan 2024; scaled as by Liu et al. 2025), or Adafactor.

    Weight decay touches matrices only, by the parameter specs.
    """

    SECTION: ClassVar[str] = "optimizer"
    kind: Literal["adamw", "muon", "adafactor"] = setting(
        "muon",
        "muon: orthogonalised steps for the matrices of the blocks, AdamW for the rest; adafactor: second moments of "
        "matrices as a row and a column, half of AdamW's state, next to none with b1 = 0",
    )
    b1: float = setting(
        0.9, "AdamW: decay of the mean of gradients; Adafactor: of steps, 0 keeps none", at_least=0, at_most=0.999999
    )
    b2: float = setting(
        0.99,
        "AdamW: decay of the mean of squared gradients; Adafactor: its largest decay",
        at_least=0,
        at_most=0.999999,
    )
    eps: float = setting(1e-8, "AdamW: added to the root of the second moment", at_least=0)
    momentum: float | None = setting(None, "Muon's momentum; None: 0.95", at_least=0, at_most=0.999999)
    weight_decay: float = setting(0.1, "decoupled; times the learning rate, on matrices only", at_least=0)
    clip_norm: float | None = setting(1.0, "gradients are scaled down to this global L2 norm; None: never", above=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.momentum is not None and self.kind != "muon":
            raise UserError(f"optimizer.momentum = {self.momentum} has no effect with optimizer.kind = '{self.kind}'")
        if self.kind == "adafactor" and self.eps != OptimizerConfig.eps:
            raise UserError(f"optimizer.eps = {self.eps} has no effect with optimizer.kind = 'adafactor'")


def make_optimizer(
    config: OptimizerConfig, model: ModelConfig, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """The direction of descent: the optimizer's of the gradient clipped by its global norm, plus weight decay.

    The training step multiplies it by -learning rate, so that the schedule follows the step and nothing else.
    """
    # without clipping the state has the same form, so that a run can go on with another setting
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    direction = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.kind == "adafactor":
        direction = adafactor(config.b1, config.b2, model)
    if config.kind == "muon":
        groups = map_specs(lambda _, spec: group_of(config, spec), model)
        momentum = 0.95 if config.momentum is None else config.momentum
        direction = optax.partition({"adamw": direction, "muon": muon(momentum, model, mesh)}, groups)
    if model.width_ratio != 1:
        rates = map_specs(lambda _, spec: width_factor(config, model, spec), model)
        direction = optax.chain(direction, times(rates))
    return optax.chain(clip, direction, optax.add_decayed_weights(config.weight_decay, mask=decay_mask(model)))


def group_of(config: OptimizerConfig, spec: Spec) -> Literal["adamw", "muon", "adafactor"]:
    """Which optimizer steps a tensor."""
    return "adamw" if config.kind == "muon" and spec.matrix is None else config.kind


def width_factor(config: OptimizerConfig, model: ModelConfig, spec: Spec) -> float:
    """muP's part of a tensor's learning rate: how much smaller its steps are than at `mup_width`; decay stays.

    A matrix whose inputs grow by r takes 1/r of an Adam step (Yang et al. 2022, table 8). Of an orthogonal step, whose
    largest singular value Muon lets grow as sqrt(longer side), what makes it grow as sqrt(outputs / inputs) (Yang,
    Simon and Bernstein 2023). Tables, the head, gains and biases keep theirs. Widths of heads, MLP and experts are
    taken to grow as d_model does, the number of experts not to.
    """
    if spec.matrix is None:
        return 1.0
    r = model.width_ratio
    if group_of(config, spec) != "muon":
        return 1 / r
    rows, columns = sides(spec)
    grown = 1.0 if spec.matrix == ROUTER else r
    return math.sqrt(grown / r * max(rows / r, columns / grown) / max(rows, columns))
