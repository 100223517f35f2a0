"""A few steps of tiny variants on one and on eight virtual CPU devices, in a process of its own, as their number is
fixed at start. Prints the metrics of each step as JSON: {variant: {mesh: {metric: [...]}}}."""

import json
from typing import Any

import jax
import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.sharding import MeshConfig, make_mesh, place_batch
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import compile_step, sharded_init_state

STEPS, B, T, V = 6, 8, 10, 61
SIZES = dict(vocab_size=V, context_length=T, d_model=16, n_layer=2, n_head=4, vocab_multiple=8)
LLAMA = dict(norm="rms", norm_shift=False, position="rotary", gated=True, mlp_bias=False, mlp_size=20)
VARIANTS = {
    "llama": (
        ModelConfig(**SIZES, **LLAMA, activation="silu", n_kv_head=2, window=4, global_every=2, tie_embeddings=False),
        EngineConfig(blocks="scan", kernels="pallas", attention="blockwise", attention_block=4),
        OptimizerConfig("muon", eps=1e-3),
    ),
    "gemma": (
        ModelConfig(
            **SIZES, **LLAMA, norm_position="sandwich", qk_norm=True, n_kv_head=2, window=4, global_every=2,
            rotary_local_base=100.0, attention_soft_cap=2.0, logit_soft_cap=3.0, embedding_scale=4.0,
        ),
        EngineConfig(blocks="unroll", remat="block", loss_chunk=8),
        OptimizerConfig("adafactor"),
    ),
    "alibi": (
        ModelConfig(
            **SIZES, position="alibi", norm_position="post", final_norm=False, attention_bias=True, gated=True,
            activation="relu2", branch_gain=0.5,
        ),
        EngineConfig(blocks="scan", attention="xla"),
        OptimizerConfig("adamw", eps=1e-3),
    ),
}  # fmt: skip


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        tokens = ((3 * np.arange(T + 1) + rng.integers(0, V, (B, 1))) % V).astype(np.int32)
        weights = rng.uniform(0, 2, (B, T)).astype(np.float32)
        segments = (rng.random((B, T)) < 0.2).cumsum(1).astype(np.int32)
        made.append(dict(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], weights_BT=weights, segments_BT=segments))
    return made


def run(name: str, sizes: tuple[int, int, int]) -> dict[str, list[float]]:
    model, engine, optimizer = VARIANTS[name]
    config = RunConfig(
        model,
        TrainConfig(steps=STEPS, batch_size=B),
        optimizer=optimizer,
        schedule=ScheduleConfig(kind="constant", peak=0.01, warmup=1),
        engine=engine,
        mesh=MeshConfig(*sizes),
    )
    mesh = make_mesh(config.mesh, jax.devices()[: np.prod(sizes)])
    state, metrics = sharded_init_state(config, mesh), []
    step: Any = compile_step(config, mesh)
    for batch in batches():
        state, measured = step(state, place_batch(batch, mesh, B))
        metrics.append(jax.device_get(measured))
    return {key: [float(m[key]) for m in metrics] for key in ("loss", "grad_norm", "param_norm")}


if __name__ == "__main__":
    print(json.dumps({name: {str(mesh): run(name, mesh) for mesh in ((1, 1, 1), (2, 2, 2))} for name in VARIANTS}))
