"""The model as a flax.linen module. It names parameters, and calls the functions of `andrea_jax`."""

from __future__ import annotations

import functools

import jax
from flax import linen as nn
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.interop.params_tree import fitted, split_axes
from andrea_jax.model import ENGINE, model_forward
from andrea_jax.parameters import Params, init_params, specs


class Andrea(nn.Module):
    """`model_forward` with our parameters as the collection `params`: `apply({"params": params}, tokens_BT)`.

    `init(key, tokens_BT)` is `{"params": init_params(key, config)}`, the same bits (inside another module, of that key
    folded with the module's path). With `partitioned` each array comes in a box with the logical names of the axes that
    a mesh splits: `nn.logical_to_mesh(nn.get_partition_spec(...), tuple(RULES.items()))` is what sharding.py says;
    `apply` takes both forms.
    """

    config: ModelConfig
    engine: EngineConfig = ENGINE
    mesh: Mesh | None = None
    partitioned: bool = False

    @nn.compact
    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """float32 logits [B, T, V]; see `model_forward`. Dropout with `deterministic=False, rngs={"dropout": key}`.

        Raises:
            UserError: a tensor of `params` is missing, too much or of another shape.
        """
        params = self._initial() if self.is_initializing() else nn.unbox(self.variables.get("params", {}))
        key = None if deterministic or self.config.dropout == 0 else self.make_rng("dropout")
        return model_forward(
            fitted(params, self.config), tokens_BT, self.config, self.engine, segments_BT, key, self.mesh
        )

    def _initial(self) -> Params:
        """Puts new parameters into the collection."""

        @functools.cache
        def params() -> Params:
            assert self.scope is not None  # it is there wherever a compact method runs
            key = self.scope.rngs["params"].as_jax_rng()  # the caller's own; `make_rng` would fold it with a count
            params = init_params(key, self.config)
            return _boxed(params, self.config) if self.partitioned else params

        return {name: self.param(name, lambda _, name=name: params()[name]) for name in specs(self.config)}


def _boxed(params: Params, config: ModelConfig) -> Params:
    return jax.tree.map(lambda x, spec: nn.LogicallyPartitioned(x, split_axes(spec)), params, specs(config))
