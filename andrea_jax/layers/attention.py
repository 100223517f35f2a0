"""Causal multi-head attention: the projections, and one function over its back ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from andrea_jax.engine import EngineConfig
from andrea_jax.layers.blockwise_attention import blockwise_attention
from andrea_jax.settings import UserError
from andrea_jax.sharding import constrain, named, several, use

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
EXPLICIT_UP_TO = 256  # on CPU, up to this context, one [T, T] tile per head is faster than blocks


def attention(p: Mapping[str, jax.Array], x_BTD: jax.Array, attend: Attend, mesh: Mesh | None = None) -> jax.Array:
    """attend(q, k, v), heads concatenated, times `out`; q, k, v = x `qkv`. The biases may be absent."""
    dtype = x_BTD.dtype
    D, N, _, H = p["qkv"].shape
    qkv = use(p["qkv"], dtype, mesh, "embed", "heads", None, None)
    qkv_BTNSH = (x_BTD @ qkv.reshape(D, -1)).reshape(*x_BTD.shape[:-1], N, 3, H)
    qkv_BTNSH = constrain(qkv_BTNSH, mesh, "batch", None, "heads", None, None)
    if "b_qkv" in p:
        qkv_BTNSH = qkv_BTNSH + p["b_qkv"].astype(dtype)
    y_BTNH = attend(qkv_BTNSH[..., 0, :], qkv_BTNSH[..., 1, :], qkv_BTNSH[..., 2, :])
    out = use(p["out"], dtype, mesh, "heads", None, "embed")
    y_BTD = y_BTNH.reshape(*x_BTD.shape[:-1], -1) @ out.reshape(-1, D)
    return y_BTD + p["b_out"].astype(dtype) if "b_out" in p else y_BTD


def causal_attend(engine: EngineConfig, segments_BT: jax.Array | None = None, mesh: Mesh | None = None) -> Attend:
    """softmax(q k^T / sqrt(H)) v over positions that are not later and, with `segments_BT`, of the same segment.

    The result is a function of q, k, v, each [B, T, N, H]; softmax in float32, output in q's dtype. Over a mesh each
    device attends within its own rows and heads.
    """

    def attend(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        T, H = q_BTNH.shape[1], q_BTNH.shape[3]
        back_end = choose_back_end(engine, q_BTNH.dtype, T, H)
        if back_end == "explicit":
            return explicit_attention(q_BTNH, k_BTNH, v_BTNH, segments_BT)
        if back_end == "blockwise":
            return blockwise_attention(q_BTNH, k_BTNH, v_BTNH, segments_BT, engine.attention_block)
        implementation: Literal["cudnn", "xla"] = "cudnn" if back_end == "cudnn" else "xla"
        mask = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
        return jax.nn.dot_product_attention(
            q_BTNH, k_BTNH, v_BTNH, mask=mask, is_causal=True, implementation=implementation
        )

    if several(mesh):
        heads, rows = named(mesh, "batch", None, "heads", None).spec, named(mesh, "batch", None).spec
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
        )
    attend = jax.checkpoint(attend) if engine.remat == "attention" else attend
    return lambda q_BTNH, k_BTNH, v_BTNH: attend(q_BTNH, k_BTNH, v_BTNH, segments_BT)


def explicit_attention(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array | None = None
) -> jax.Array:
    """The formula written out, with all scores [B, N, T, T] at once."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH, preferred_element_type=jnp.float32) * H**-0.5
    visible = jnp.tril(jnp.ones((T, T), bool))
    if segments_BT is not None:
        visible = visible & (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    weights_BNTS = jax.nn.softmax(jnp.where(visible, scores_BNTS, -jnp.inf), axis=-1).astype(v_BTNH.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH)


def choose_back_end(engine: EngineConfig, dtype: Any, T: int, H: int) -> str:
    """The back end that `engine.attention` stands for, at these sizes and on the default device."""
    if engine.attention != "auto":
        return engine.attention
    if jax.default_backend() == "gpu":
        return "xla" if why_not_cudnn(dtype, H) else "cudnn"
    return "explicit" if T <= EXPLICIT_UP_TO else "blockwise"


def why_not_cudnn(dtype: Any, H: int, platform: str | None = None) -> list[str]:
    """What keeps cuDNN's attention from running, on the default device or another `platform`; empty: nothing."""
    platform = platform or jax.default_backend()
    reasons = [] if platform == "gpu" else [f"the device is {platform}, not a GPU"]
    if dtype not in CUDNN_DTYPES:
        reasons.append(f"activations are {jnp.dtype(dtype).name}, not bfloat16 or float16")
    if H % 8 or H > 128:
        reasons.append(f"head_dim is {H}, not a multiple of 8 up to 128")
    return reasons


def check_attention(engine: EngineConfig, dtype: Any, H: int) -> None:
    """Raises UserError, before anything compiles, if an explicitly chosen back end cannot run here."""
    reasons = why_not_cudnn(dtype, H) if engine.attention == "cudnn" else []
    if reasons:
        raise UserError(f"engine.attention = 'cudnn' cannot run: {'; '.join(reasons)}. 'auto' chooses one that can")
