"""Parameters, described before they exist. Everything else about them derives from `specs`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig

Params = dict[str, Any]
Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class Matrix(NamedTuple):
    """The axes that a product sums over and those that it makes; a tensor's other axes count separate matrices."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Spec(NamedTuple):
    """One tensor: its shape, the logical name of each axis, how it starts, whether weight decay touches it, and, for
    the products inside blocks, how it is a matrix."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decayed: bool = False
    matrix: Matrix | None = None


def normal(std: float) -> Init:
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def constant(value: float) -> Init:
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


ones, zeros = constant(1.0), constant(0.0)


def specs(config: ModelConfig) -> dict[str, Any]:
    """The spec tree; a model's parameters have this structure. Blocks are stacked on a leading axis L.

    Token and position tables: normal, std 1/sqrt(D), so that neither drowns the other; the stream then starts with a
    root mean square of sqrt(2/D). Matrices: normal, std sqrt(2/(5D)) (Nguyen and Salazar 2019); the two of a block that
    write into the stream, times its root mean square and 1/sqrt(2L), so that a block starts as nearly the identity at
    any width and depth. Gains start at 1, but the final one of a tied model at 1/sqrt(D): the token table's rows are of
    length 1 there, so that the first logits are of size 1 and the loss starts near ln V. Shifts and biases start at 0.
    """
    L, D, F, N, H = config.n_layer, config.d_model, config.mlp_dim, config.n_head, config.head_dim
    small = math.sqrt(2 / (5 * D))
    dense, branch = normal(small), normal(small * math.sqrt(2 / D) / math.sqrt(2 * L))

    def stacked(init: Init, matrix: Matrix | None = None, **axes: int) -> Spec:
        return Spec((L, *axes.values()), ("layer", *axes), init, matrix is not None, matrix)

    def norm(add: Callable[..., Spec], gain_init: Init = ones) -> dict[str, Spec]:
        gain = {"gain": add(gain_init, embed=D)} if config.norm_gain else {}
        return gain | ({"shift": add(zeros, embed=D)} if config.norm_shift else {})

    embed, heads, hidden = ("embed",), ("heads", "head_dim"), ("mlp",)
    attention = {
        "qkv": stacked(dense, Matrix(embed, heads), embed=D, heads=N, qkv=3, head_dim=H),
        "out": stacked(branch, Matrix(heads, embed), heads=N, head_dim=H, embed=D),
    }
    mlp = {
        "w_1": stacked(dense, Matrix(embed, hidden), embed=D, mlp=F),
        "w_2": stacked(branch, Matrix(hidden, embed), mlp=F, embed=D),
    }
    if config.attention_bias:
        attention |= {"b_qkv": stacked(zeros, heads=N, qkv=3, head_dim=H), "b_out": stacked(zeros, embed=D)}
    if config.mlp_bias:
        mlp |= {"b_1": stacked(zeros, mlp=F), "b_2": stacked(zeros, embed=D)}
    tree: dict[str, Any] = {
        "token_embedding": Spec((config.padded_vocab_size, D), ("vocab", "embed"), normal(D**-0.5)),
        "position_embedding": Spec((config.context_length, D), ("position", "embed"), normal(D**-0.5)),
        "blocks": {"attention_norm": norm(stacked), "attention": attention, "mlp_norm": norm(stacked), "mlp": mlp},
        "final_norm": norm(
            lambda init, embed: Spec((embed,), ("embed",), init), constant(D**-0.5) if config.tie_embeddings else ones
        ),
    }
    if not config.tie_embeddings:
        tree["head"] = Spec((D, config.padded_vocab_size), ("embed", "vocab"), dense, True)
    return tree


def _is_spec(node: Any) -> bool:
    return isinstance(node, Spec)


def map_specs(f: Callable[[str, Spec], Any], config: ModelConfig) -> Params:
    """The spec tree with each spec replaced by f(name, spec); names look like `blocks.mlp.w_1`."""
    return jax.tree.map_with_path(lambda path, spec: f(path_name(path), spec), specs(config), is_leaf=_is_spec)


def named_specs(config: ModelConfig) -> dict[str, Spec]:
    """{name: spec} of all tensors."""
    leaves = jax.tree.leaves_with_path(specs(config), is_leaf=_is_spec)
    return {path_name(path): spec for path, spec in leaves}


def path_name(path: Any) -> str:
    """`blocks.mlp.w_1` for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """float32 parameters. Each tensor's key is folded with its own name, so adding one leaves the rest unchanged."""
    return map_specs(
        lambda name, spec: spec.init(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape), config
    )


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Shapes and dtypes of the parameters, nothing allocated."""
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, dtype), config)


def count_parameters(config: ModelConfig) -> int:
    """Exact number of parameters; a tied table counts once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(config), is_leaf=_is_spec))


def decay_mask(config: ModelConfig) -> Params:
    """True where weight decay applies: the matrices of the blocks and an untied head."""
    return map_specs(lambda _, spec: spec.decayed, config)


def logical_axes(config: ModelConfig) -> Params:
    """The logical name of each axis of each tensor."""
    return map_specs(lambda _, spec: spec.axes, config)
