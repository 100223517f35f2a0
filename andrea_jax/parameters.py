"""Parameters, described before they exist. Everything else about them derives from `specs`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from andrea_jax.config import ModelConfig

Params = dict[str, Any]
Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
FLAT = 2**24  # elements, 64 MiB


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

    def side(self, axes: tuple[str, ...]) -> int:
        """The size of some axes together."""
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)


def normal(std: float) -> Init:
    return lambda key, shape: std * _standard_normal(key, shape)


def _standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Drawn flat where that is small: the same numbers, of which the program compiles three to seven times as fast. A
    large tensor keeps its axes, so that over a mesh each device draws its own part."""
    size = math.prod(shape)
    if size > FLAT:
        return jax.random.normal(key, shape, jnp.float32)
    return jax.random.normal(key, (size,), jnp.float32).reshape(shape)


def constant(value: float) -> Init:
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


ones, zeros = constant(1.0), constant(0.0)


def specs(config: ModelConfig) -> dict[str, Any]:
    """The spec tree; a model's parameters have this structure. Blocks are stacked on a leading axis L.

    Token and position tables: normal, std 1/sqrt(D), so that neither drowns the other; the stream then starts with a
    root mean square of sqrt(2/D). Matrices: normal, std sqrt(2/(5D)) (Nguyen and Salazar 2019); the two of a block that
    write into the stream, times its root mean square and 1/sqrt(2L), so that a block starts as nearly the identity at
    any width and depth. A sandwich's outer gains start at that factor instead, and `branch_gain` stands for it. Other
    gains start at 1, but the last one of a tied model at 1/sqrt(D): the token table's rows are of length 1 there, so
    that the first logits are of size 1 and the loss starts near ln V. Shifts and biases start at 0.

    Under muP (Yang et al. 2022) tables, the head and the final gain start as at `mup_width`, and the router, whose
    outputs do not grow, smaller by the root of the ratio.
    """
    L, D = config.n_layer, config.d_model
    table, narrow = _table_std(config), config.mup_width or D
    std, small = math.sqrt(2 / (5 * D)), _branch_size(config, table)
    by_gain = config.norm_position == "sandwich" and config.norm_gain
    dense, branch = normal(std), normal(std if by_gain else std * small)
    gains = {name: constant(small) for name in ("attention_out_norm", "mlp_out_norm")}
    if config.norm_position == "post" and not config.final_norm and config.tie_embeddings:
        gains["mlp_norm"] = lambda _, shape: jnp.ones(shape).at[-1].set(narrow**-0.5)
    blocks: dict[str, Any] = {name: _norm(config, _stacked(L), gains.get(name, ones)) for name in _norm_names(config)}
    blocks |= {
        "attention": _attention(config, _stacked(L), dense, branch),
        **_feed_forward(config, _stacked(L), dense, branch),
    }
    if config.branch_gain is not None:
        gain = constant(config.branch_gain)
        blocks |= {name: {"gain": _stacked(L)(gain, embed=D)} for name in ("attention_branch", "mlp_branch")}
    tree: dict[str, Any] = {
        "token_embedding": Spec((config.padded_vocab_size, D), ("vocab", "embed"), normal(table)),
        "blocks": blocks,
    }
    if config.position == "learned":
        start = normal(table * config.embedding_scale)
        tree["position_embedding"] = Spec((config.context_length, D), ("position", "embed"), start)
    if config.final_norm:
        start = constant(narrow**-0.5) if config.tie_embeddings else ones
        tree["final_norm"] = _norm(config, lambda init, embed: Spec((embed,), ("embed",), init), start)
    if not config.tie_embeddings:
        start = normal(math.sqrt(2 / (5 * narrow)))
        tree["head"] = Spec((D, config.padded_vocab_size), ("embed", "vocab"), start, True)
    return tree


def _table_std(config: ModelConfig) -> float:
    """Of the token table: 1/sqrt(D), and less in a tied model that ends without a gain, where a token would otherwise
    predict itself with a logit of size sqrt(D) after a norm, `embedding_scale` without one. Under muP of that width."""
    D, normed = config.mup_width or config.d_model, config.final_norm or config.norm_position == "post"
    if not config.tie_embeddings:
        return D**-0.5
    if config.norm == "none" or not normed:
        return (D * config.embedding_scale) ** -0.5
    return D**-0.5 if config.norm_gain else D**-0.75


def _branch_size(config: ModelConfig, table: float) -> float:
    """By which factor what a branch writes starts smaller than what it reads, normed or not."""
    if config.branch_gain is not None:
        return 1.0
    tables = 2 if config.position == "learned" else 1
    normed = config.norm != "none" and config.norm_position != "post"
    stream = table * config.embedding_scale * math.sqrt(tables) if normed else 1.0
    return stream / math.sqrt(2 * config.n_layer)


Add = Callable[..., Spec]
ROUTER = Matrix(("embed",), ("choice",))


def _stacked(layers: int) -> Add:
    def add(init: Init, matrix: Matrix | None = None, **axes: int) -> Spec:
        return Spec((layers, *axes.values()), ("layer", *axes), init, matrix is not None, matrix)

    return add


def _norm_names(config: ModelConfig) -> list[str]:
    """The norms of a block: of what its branches read, and of what they give."""
    read = ["attention_norm"] if config.parallel_block else ["attention_norm", "mlp_norm"]
    return read + (["attention_out_norm", "mlp_out_norm"] if config.norm_position == "sandwich" else [])


def _norm(config: ModelConfig, add: Add, gain: Init = ones) -> dict[str, Spec]:
    if config.norm == "none":
        return {}
    gains = {"gain": add(gain, embed=config.d_model)} if config.norm_gain else {}
    return gains | ({"shift": add(zeros, embed=config.d_model)} if config.norm_shift else {})


def _attention(config: ModelConfig, add: Add, dense: Init, branch: Init) -> dict[str, Any]:
    """`qkv` holds, for each head of keys and values, its queries, its key and its value, in this order."""
    D, N, K, H = config.d_model, config.n_head, config.kv_heads, config.head_dim
    embed, heads = ("embed",), ("heads", "head_dim")
    tree: dict[str, Any] = {
        "qkv": add(dense, Matrix(embed, heads), embed=D, heads=K, qkv=N // K + 2, head_dim=H),
        "out": add(branch, Matrix(heads, embed), heads=N, head_dim=H, embed=D),
    }
    if config.attention_bias:
        tree |= {"b_qkv": add(zeros, heads=K, qkv=N // K + 2, head_dim=H), "b_out": add(zeros, embed=D)}
    if config.qk_norm:
        tree |= {name: {"gain": add(ones, head_dim=H)} for name in ("q_norm", "k_norm")}
    return tree


def _feed_forward(config: ModelConfig, add: Add, dense: Init, branch: Init) -> dict[str, Any]:
    """`mlp`, or `moe`: its router, its experts, and the MLP of the shared ones."""
    if config.n_expert is None:
        return {"mlp": _mlp(config, add, dense, branch, config.shared_dim)}
    E, D = config.n_expert, config.d_model
    tree: dict[str, Any] = {
        "router": add(normal(math.sqrt(2 / (5 * D * config.width_ratio))), ROUTER, embed=D, choice=E),
        **_mlp(config, add, dense, branch, config.expert_dim, "expert_mlp", expert=E),
    }
    if config.balance_bias is not None:
        tree["router_bias"] = add(zeros, choice=E)
    if config.n_shared_expert:
        tree["shared"] = _mlp(config, add, dense, branch, config.shared_dim)
    return {"moe": tree}


def _mlp(
    config: ModelConfig, add: Add, dense: Init, branch: Init, width: int, hidden: str = "mlp", **experts: int
) -> dict[str, Spec]:
    """One MLP, or one of each of `experts`; `hidden` names the axis of its width."""
    D, middle = config.d_model, {hidden: width}
    into, out = Matrix(("embed",), (hidden,)), Matrix((hidden,), ("embed",))
    tree = {
        "w_1": add(dense, into, **experts, embed=D, **middle),
        "w_2": add(branch, out, **experts, **middle, embed=D),
    }
    if config.gated:
        tree["w_gate"] = add(dense, into, **experts, embed=D, **middle)
    if config.mlp_bias:
        tree |= {"b_1": add(zeros, **experts, **middle), "b_2": add(zeros, **experts, embed=D)}
        tree |= {"b_gate": add(zeros, **experts, **middle)} if config.gated else {}
    return tree


def _is_spec(node: Any) -> bool:
    return isinstance(node, Spec)


def map_specs(f: Callable[[str, Spec], Any], config: ModelConfig) -> Params:
    """The spec tree with each spec replaced by f(name, spec); names look like `blocks.mlp.w_1`."""
    return jax.tree.map_with_path(lambda path, spec: f(path_name(path), spec), specs(config), is_leaf=_is_spec)


def named_specs(config: ModelConfig) -> dict[str, Spec]:
    """{name: spec} of all tensors."""
    return by_name(specs(config), _is_spec)


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """{name: leaf}; names look like `blocks.mlp.w_1`."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)}


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


def count_active_parameters(config: ModelConfig) -> int:
    """How many a token meets: of the experts those that it chooses; of all other tensors everything."""
    return int(sum(math.prod(spec.shape) * active_part(config, spec) for spec in named_specs(config).values()))


def active_part(config: ModelConfig, spec: Spec) -> Fraction:
    """The part of a tensor that a token meets."""
    return Fraction(config.expert_top_k, config.n_expert) if config.n_expert and "expert" in spec.axes else Fraction(1)


def decay_mask(config: ModelConfig) -> Params:
    """True where weight decay applies: the matrices of the blocks and an untied head."""
    return map_specs(lambda _, spec: spec.decayed, config)


def logical_axes(config: ModelConfig) -> Params:
    """The logical name of each axis of each tensor."""
    return map_specs(lambda _, spec: spec.axes, config)
