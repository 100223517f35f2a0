"""The model as a flax.nnx module. It holds parameters, and calls the functions of `andrea_jax`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.interop.params_tree import fitted, split_axes
from andrea_jax.model import ENGINE, model_forward
from andrea_jax.parameters import Params, init_params, map_specs, named_specs
from andrea_jax.settings import UserError
from andrea_jax.sharding import constrain


class Andrea(nnx.Module):
    """`model_forward` of parameters that are `nnx.Param`s at our names: `model.blocks.mlp.w_1` is [L, D, F].

    Starts from `init_params(rngs.params(), config)`, and, as Flax's layers do, in training mode: with `config.dropout`
    it draws from the stream `dropout` until `model.eval()`. Each Param carries the logical names of the axes that a
    mesh splits; under `nnx.logical_axis_rules(tuple(RULES.items()))`, `nnx.get_partition_spec` gives what sharding.py
    says. Over a `mesh` they are laid out so, and activations as `model_forward` does it.

    The loss is `loss_fn(model.params(), batch, config, engine, dropout_key=model.dropout_key())`. No gradient moves
    `router_bias`; `nnx.update(model, move_router_bias(model.params(), metrics["routing"], config))` does.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig = ENGINE,
        mesh: Mesh | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        params: Params | None = None,
    ) -> None:
        if params is None:
            if rngs is None:
                raise UserError("parameters start from a key: give rngs=nnx.Rngs(0), or params")
            params = init_params(rngs.params(), config)
        self.config, self.engine, self.mesh, self.deterministic = config, engine, mesh, False
        self.rngs = rngs.dropout.fork() if rngs is not None and config.dropout else nnx.data(None)
        for name, tree in _variables(fitted(params, config), config, mesh).items():
            setattr(self, name, tree)

    @classmethod
    def from_params(cls, params: Params, config: ModelConfig, **options: Any) -> Andrea:
        """The module of given parameters, which are not copied, with Andrea's other options; `rngs` for dropout only.

        Raises:
            UserError: a tensor is missing, too much or of another shape.
        """
        return cls(config, params=params, **options)

    def params(self) -> Params:
        """The nested dicts that all functions of `andrea_jax` take, such as `loss_fn`; the arrays are not copied."""
        return map_specs(lambda name, _: attrgetter(name)(self).get_value(), self.config)

    _params = params  # nnx.tabulate shows a row for each public method that is called

    def __call__(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """float32 logits [B, T, V]; see `model_forward`."""
        key = self._dropout_key(deterministic, rngs)
        return model_forward(self._params(), tokens_BT, self.config, self.engine, segments_BT, key, self.mesh)

    def dropout_key(self, deterministic: bool | None = None, rngs: nnx.Rngs | None = None) -> jax.Array | None:
        """A new key of the stream `dropout`, for `loss_fn`; None in evaluation and without dropout.

        Raises:
            UserError: there is no stream.
        """
        if self.config.dropout == 0 or (self.deterministic if deterministic is None else deterministic):
            return None
        stream = self.rngs if rngs is None else rngs.dropout
        if stream is None:
            raise UserError("dropout in training needs rngs=nnx.Rngs(dropout=SEED); model.eval() turns it off")
        return stream()

    _dropout_key = dropout_key

    def set_view(self, deterministic: bool | None = None) -> None:
        """For `nnx.view(model, deterministic=True)`."""
        if deterministic is not None:
            self.deterministic = deterministic


def _variables(params: Params, config: ModelConfig, mesh: Mesh | None) -> Params:
    """`params` with an `nnx.Param` for each array, and an `nnx.Dict` for each dict below the first."""
    axes = {name: split_axes(spec) for name, spec in named_specs(config).items()}

    def variable(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return nnx.Dict({key: variable(f"{name}.{key}", inner) for key, inner in value.items()})
        return nnx.Param(constrain(value, mesh, *axes[name]), out_sharding=axes[name], eager_sharding=False)

    return {name: variable(name, value) for name, value in params.items()}


def params_of(state: Any, config: ModelConfig) -> Params:
    """An `nnx.State` with a model's tensors, such as its gradients, as nested dicts.

    Raises:
        UserError: a tensor is missing, too much or of another shape.
    """
    return fitted(nnx.to_pure_dict(state), config)


def on_states(optimizer: optax.GradientTransformation, config: ModelConfig) -> optax.GradientTransformation:
    """An optimizer of our trees (`make_optimizer`, or a mask from `decay_mask`) as one for `nnx.Optimizer`."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        tree = None if params is None else params_of(params, config)
        updates, state = optimizer.update(params_of(gradients, config), state, tree)
        return jax.tree.unflatten(jax.tree.structure(gradients), jax.tree.leaves(updates)), state

    return optax.GradientTransformation(lambda params: optimizer.init(params_of(params, config)), update)
