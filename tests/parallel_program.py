"""Twenty steps of tiny models on up to eight virtual CPU devices, for test_parallel; in a process of its own, as the
number of devices is fixed at start. Writes CASE.npz (metrics, parameters, evaluation) and CASE.hlo (the step) into a
folder.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.evaluate import evaluate
from andrea_jax.loss import Batch
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import path_name
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.sharding import MeshConfig, make_mesh, place_batch
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import compile_step, sharded_init_state
from andrea_jax.train.state import State

STEPS, B, T, V = 20, 16, 10, 61  # T divides an axis of every activation, and of no weight but the position table
PEAK = 0.01
SCHEDULE = ScheduleConfig(kind="constant", peak=PEAK, warmup=2)
# eps: where a gradient is as small as its own rounding error, Adam would make whole steps of the error.
ADAMW = OptimizerConfig("adamw", eps=1e-3, b2=0.9)
MUON = OptimizerConfig("muon", eps=1e-3, b2=0.9)
SMALL = ModelConfig(vocab_size=V, context_length=T, d_model=32, n_layer=2, n_head=4, vocab_multiple=8)
# Tied and padded to 64, with dropout; the other untied and not padded, with all biases and no shifts.
TIED = RunConfig(
    dataclasses.replace(SMALL, dropout=0.1),
    TrainConfig(steps=STEPS, batch_size=B, z_loss=1e-3),
    optimizer=ADAMW,
    schedule=SCHEDULE,
    engine=EngineConfig(loss_chunk=5 * B, kernels="xla", blocks="unroll"),
)
UNTIED = RunConfig(
    dataclasses.replace(SMALL, vocab_size=64, tie_embeddings=False, attention_bias=True, norm_shift=False),
    TrainConfig(steps=STEPS, batch_size=B),
    optimizer=MUON,
    schedule=SCHEDULE,
    engine=EngineConfig(kernels="xla", blocks="scan"),
)


class Case(NamedTuple):
    """A run in a layout (data, fsdp, tensor), with some settings of `train` and `engine` replaced."""

    config: RunConfig
    mesh: tuple[int, int, int]
    train: Mapping[str, Any] = MappingProxyType({})
    engine: Mapping[str, Any] = MappingProxyType({})

    def run_config(self) -> RunConfig:
        train = dataclasses.replace(self.config.train, **self.train)
        engine = dataclasses.replace(self.config.engine, **self.engine)
        return dataclasses.replace(self.config, mesh=MeshConfig(*self.mesh), train=train, engine=engine)


CASES = {
    "tied": Case(TIED, (1, 1, 1)),
    "tied_data_8": Case(TIED, (8, 1, 1)),
    "tied_fsdp_8": Case(TIED, (1, 8, 1), engine={"remat": "block"}),
    "tied_tensor_4": Case(TIED, (1, 1, 4)),
    "tied_2x2x2": Case(TIED, (2, 2, 2), engine={"kernels": "pallas"}),
    "tied_pmap_8": Case(TIED, (8, 1, 1), {"parallel": "pmap", "accumulate": 2}),
    "untied": Case(UNTIED, (1, 1, 1)),
    "untied_2x2x1": Case(UNTIED, (2, 2, 1), {"accumulate": 4}, {"remat": "block", "kernels": "pallas"}),
    "untied_1x2x1": Case(UNTIED, (1, 2, 1), engine={"blocks": "unroll"}),
    "untied_2x1x4": Case(UNTIED, (2, 1, 4), engine={"remat": "attention", "attention": "blockwise"}),
}


def batches(count: int) -> list[Batch]:
    """Walks through the ids with jumps; weights of all sizes, rows without any; documents that end anywhere."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        steps = np.where(rng.random((B, T + 1)) < 0.2, rng.integers(0, V, (B, T + 1)), 3)
        tokens = (steps.cumsum(1) % V).astype(np.int32)
        weights = rng.uniform(0, 2, (B, T)) * (rng.random((B, T)) < 0.8) * (np.arange(B) % 5 > 0)[:, None]
        segments = (rng.random((B, T)) < 0.2).cumsum(1).astype(np.int32)
        made.append(
            {
                "tokens_BT": tokens[:, :-1],
                "targets_BT": tokens[:, 1:],
                "weights_BT": weights.astype(np.float32),
                "segments_BT": segments,
            }
        )
    return made


def run(case: Case, folder: Path, name: str) -> None:
    config = case.run_config()
    mesh = make_mesh(config.mesh, jax.devices()[: math.prod(case.mesh)])
    state, data = sharded_init_state(config, mesh), batches(STEPS)
    step: Any = compile_step(config, mesh)
    if config.train.parallel == "jit":
        step = step.lower(state, place_batch(data[0], mesh, B)).compile()
        (folder / f"{name}.hlo").write_text(step.as_text())
    nudged = jax.tree.map(jnp.copy, state.replace(params=jax.tree.map(nudge, state.params))) if mesh.size == 1 else None
    save(folder / f"{name}.npz", config, mesh, *train(step, state, data, mesh))
    if nudged is not None:
        save(folder / f"{name}_nudged.npz", config, mesh, *train(step, nudged, data, mesh))


def train(step: Any, state: State, data: list[Batch], mesh: Mesh) -> tuple[State, list[Any]]:
    metrics = []
    for batch in data:
        state, measured = step(state, place_batch(batch, mesh, B))
        metrics.append(jax.device_get(measured))
    return state, metrics


def nudge(x: jax.Array) -> jax.Array:
    """x rounded otherwise: each number one unit in its last place up or down."""
    up = np.random.default_rng(x.size).random(x.shape) < 0.5
    return jax.device_put(np.nextafter(np.asarray(x), np.where(up, np.inf, -np.inf).astype(np.float32)), x.sharding)


def save(file: Path, config: RunConfig, mesh: Mesh, state: State, metrics: list[Any]) -> None:
    lengths = np.ones(config.model.vocab_size, np.int64)
    evaluation = evaluate(state.params, batches(2), config.model, lengths, config.engine, mesh)
    arrays = {key: np.array([m[key] for m in metrics]) for key in metrics[0]}
    arrays |= {f"evaluation.{key}": np.array(value) for key, value in evaluation.items()}
    arrays |= {f"params.{path_name(path)}": np.asarray(x) for path, x in jax.tree.leaves_with_path(state.params)}
    np.savez(file, **arrays)


if __name__ == "__main__":
    for name, case in CASES.items():
        run(case, Path(sys.argv[1]), name)
