"""Causal attention: the projections, and one function over its back ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from andrea_jax.config import ModelConfig
from andrea_jax.engine import BackEnd, EngineConfig
from andrea_jax.layers.blockwise_attention import blockwise_attention
from andrea_jax.layers.norm import head_norm
from andrea_jax.layers.position import alibi_slopes, rotate
from andrea_jax.layers.scores import Scores, explicit_attention
from andrea_jax.settings import UserError
from andrea_jax.sharding import constrain, named, several, use

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
LIBRARY = ("cudnn", "xla")  # the back ends of jax.nn.dot_product_attention
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
EXPLICIT_UP_TO = 256  # on CPU, up to this context, one [T, T] tile per head is faster than blocks


def attention(
    p: Mapping[str, Any], x_BTD: jax.Array, config: ModelConfig, attend: Attend, mesh: Mesh | None = None
) -> jax.Array:
    """attend(q, k, v), heads concatenated, times `out`; q, k, v = x `qkv`. The biases may be absent.

    A head of keys and values serves N/K heads of queries in a row (Ainslie et al. 2023).
    """
    dtype = x_BTD.dtype
    D, K, S, H = p["qkv"].shape
    qkv = use(p["qkv"], dtype, mesh, "embed", "heads", None, None)
    qkv_BTKSH = (x_BTD @ qkv.reshape(D, -1)).reshape(*x_BTD.shape[:-1], K, S, H)
    qkv_BTKSH = constrain(qkv_BTKSH, mesh, "batch", None, "heads", None, None)
    if "b_qkv" in p:
        qkv_BTKSH = qkv_BTKSH + p["b_qkv"].astype(dtype)
    q_BTNH = qkv_BTKSH[..., :-2, :].reshape(*x_BTD.shape[:-1], K * (S - 2), H)
    k_BTKH, v_BTKH = qkv_BTKSH[..., -2, :], qkv_BTKSH[..., -1, :]
    if config.qk_norm:
        q_BTNH, k_BTKH = (head_norm(p[n], x, config.norm_eps) for n, x in (("q_norm", q_BTNH), ("k_norm", k_BTKH)))
    y_BTNH = attend(q_BTNH, k_BTKH, v_BTKH)
    out = use(p["out"], dtype, mesh, "heads", None, "embed")
    y_BTD = y_BTNH.reshape(*x_BTD.shape[:-1], -1) @ out.reshape(-1, D)
    return y_BTD + p["b_out"].astype(dtype) if "b_out" in p else y_BTD


def causal_attend(
    config: ModelConfig,
    engine: EngineConfig,
    segments_BT: jax.Array | None = None,
    mesh: Mesh | None = None,
    layer: jax.Array | int = 0,
) -> Attend:
    """softmax(score(q, k)) v over positions that are not later, within the window of block `layer` if it has one and,
    with `segments_BT`, of the same segment.

    The result is a function of q [B, T, N, H] and k, v [B, T, K, H], with positions added as the config says; softmax
    in float32, output in q's dtype. Over a mesh each device attends within its own rows and heads.
    """
    sees_all = config.sees_all(layer)
    slopes_N = jnp.asarray(alibi_slopes(config.n_head)) if config.position == "alibi" else None

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        positions_T = jnp.arange(q_BTNH.shape[1])
        q_BTNH, k_BTKH = (rotate(x, positions_T, config, sees_all) for x in (q_BTNH, k_BTKH))
        inputs = (q_BTNH, k_BTKH, v_BTKH, segments_BT, slopes_N)
        if isinstance(sees_all, bool):
            return core(sees_all)(*inputs)
        return jax.lax.cond(sees_all, core(True), core(False), *inputs)

    def core(sees_all: bool) -> Callable[..., jax.Array]:
        scores = Scores.of(config, sees_all)

        def local(*inputs: Any) -> jax.Array:
            return _attend(config, engine, scores, *inputs)

        if mesh is None or not several(mesh):
            return local
        heads, rows = named(mesh, "batch", None, "heads", None).spec, named(mesh, "batch", None).spec
        specs = (heads, heads, heads, rows, PartitionSpec("tensor"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)

    return jax.checkpoint(attend) if engine.remat == "attention" else attend


def _attend(
    config: ModelConfig,
    engine: EngineConfig,
    scores: Scores,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    slopes_N: jax.Array | None,
) -> jax.Array:
    T = q_BTNH.shape[1]
    back_end = choose_back_end(engine, config, q_BTNH.dtype, T)
    if back_end in LIBRARY and (reasons := _why_not_library(config)):
        raise _cannot(back_end, reasons)
    if back_end == "explicit":
        return explicit_attention(q_BTNH, k_BTKH, v_BTKH, scores, segments_BT, slopes_N)
    if back_end == "blockwise":
        return blockwise_attention(q_BTNH, k_BTKH, v_BTKH, scores, segments_BT, slopes_N, engine.attention_block)
    biased = segments_BT is not None or slopes_N is not None
    if engine.attention == "auto" and biased and T % 2:  # which cuDNN's backward pass does not take
        back_end = "xla"
    implementation: Literal["cudnn", "xla"] = "cudnn" if back_end == "cudnn" else "xla"
    mask = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    bias_1NTT = None
    if slopes_N is not None:
        distance_TT = jnp.maximum(jnp.arange(T)[:, None] - jnp.arange(T), 0)
        bias_1NTT = -slopes_N[None, :, None, None] * distance_TT
        bias_1NTT = bias_1NTT.astype(q_BTNH.dtype) if back_end == "cudnn" else bias_1NTT
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        bias=bias_1NTT,
        mask=mask,
        is_causal=True,
        scale=scores.scale,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation=implementation,
    )


def choose_back_end(
    engine: EngineConfig, config: ModelConfig, dtype: Any, T: int, platform: str | None = None
) -> BackEnd:
    """The back end that `engine.attention` stands for, at these sizes, on the default device or another `platform`."""
    if engine.attention != "auto":
        return engine.attention
    platform = platform or jax.default_backend()
    if platform == "gpu" and config.attention_soft_cap is None:
        return "xla" if why_not_cudnn(config, dtype, platform) else "cudnn"
    return "explicit" if T <= EXPLICIT_UP_TO else "blockwise"


def why_not_cudnn(config: ModelConfig, dtype: Any, platform: str | None = None) -> list[str]:
    """What keeps cuDNN's attention from running, on the default device or another `platform`; empty: nothing."""
    H, platform = config.head_dim, platform or jax.default_backend()
    reasons = [] if platform == "gpu" else [f"the device is {platform}, not a GPU"]
    if dtype not in CUDNN_DTYPES:
        reasons.append(f"activations are {jnp.dtype(dtype).name}, not bfloat16 or float16")
    if H % 8 or H > 128:
        reasons.append(f"head_dim is {H}, not a multiple of 8 up to 128")
    return reasons + _why_not_library(config)


def _why_not_library(config: ModelConfig) -> list[str]:
    return [] if config.attention_soft_cap is None else ["it has no attention_soft_cap"]


def check_attention(engine: EngineConfig, config: ModelConfig, dtype: Any, platform: str | None = None) -> None:
    """Raises UserError, before anything compiles, if an explicitly chosen back end cannot run here, or there."""
    checks = {"cudnn": lambda: why_not_cudnn(config, dtype, platform), "xla": lambda: _why_not_library(config)}
    if reasons := checks.get(engine.attention, list)():
        raise _cannot(engine.attention, reasons)


def _cannot(back_end: str, reasons: list[str]) -> UserError:
    return UserError(f"engine.attention = '{back_end}' cannot run: {'; '.join(reasons)}. 'auto' chooses one that can")
