"""Run by test_cross_mesh.py with eight virtual devices: saves on one mesh, goes on over others; prints what it saw."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from andrea_jax import ModelConfig
from andrea_jax.checkpoint import open_for_saving, restore_state, saved_tensors
from andrea_jax.checkpoint import save as save_state
from andrea_jax.data.shards import tokens_in_memory
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.data.windows import make_batches
from andrea_jax.sharding import MeshConfig, local_rows, make_mesh, place_batch
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import compile_step, sharded_abstract_state, sharded_init_state

MODEL = ModelConfig(vocab_size=260, context_length=16, d_model=32, n_layer=1, n_head=4, dropout=0.1)
MESHES = (
    (8, MeshConfig(fsdp=8)),
    (4, MeshConfig(data=2, tensor=2)),
    (1, MeshConfig()),
    (8, MeshConfig(data=2, fsdp=2, tensor=2)),
)
B = 16
tokens = tokens_in_memory(np.random.default_rng(0).integers(0, 256, 4001))


def on(devices, mesh, parallel="jit"):
    """(settings, mesh, compiled step, batches) over the first `devices`."""
    train = TrainConfig(steps=100, batch_size=B, accumulate=2, parallel=parallel)
    config = RunConfig(model=MODEL, train=train, mesh=mesh)
    made = make_mesh(mesh, jax.devices()[:devices])
    batches = make_batches(tokens, B, MODEL.context_length, 0, rows=local_rows(made, B))
    return config, made, compile_step(config, made), batches


def train(place, state, steps):
    """`steps` steps from where the state is; the losses and the batches as they lay on the devices."""
    _, mesh, step, batches = place
    losses, seen = [], []
    for _ in range(steps):
        batch = place_batch(batches[int(state.step)], mesh, B)
        seen.append(np.asarray(batch["tokens_BT"]))
        state, metrics = step(state, batch)
        losses.append(float(metrics["nll"]))
    return state, losses, seen


def save(folder, state):
    meta = {"model": dataclasses.asdict(MODEL), "tokenizer": bytes_tokenizer().to_dict(), "settings": {}}
    with open_for_saving(folder, 10) as manager:
        save_state(manager, state, meta | {"tokens": 0}, None)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.optimizer))]


def restore(folder, place, step):
    return restore_state(folder, step, sharded_abstract_state(place[0], place[1]))


def spread(state):
    """Of the largest tensor: the number of devices, and the share of it that one of them holds."""
    x = state.params["blocks"]["mlp"]["w_1"]
    return len(x.sharding.device_set), x.addressable_shards[0].data.size / x.size


def main(folder):
    place = on(*MESHES[0])
    state, _, _ = train(place, sharded_init_state(place[0], place[1]), 3)
    moves = []
    for target in (*MESHES[1:], (4, MeshConfig(), "pmap")):
        step = int(state.step)
        bits = save(folder, state)
        _, stayed, batches_there = train(place, state, 1)
        place = on(*target)
        state = restore(folder, place, step)
        lies = spread(state)
        restored = [np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.optimizer))]
        state, moved, batches_here = train(place, state, 2)
        moves.append(
            {
                "step": step,
                "tensors": len(bits),
                "equal": sum(a == b for a, b in zip(bits, restored, strict=True)),
                "lies": lies,
                "losses": [stayed[0], moved[0]],
                "same_batch": bool((batches_there[0] == batches_here[0]).all()),
                "next_batch": batches_here[1].tolist(),
            }
        )
    mesh = saved_tensors(folder, 3, "params")["blocks.mlp.w_1"].mesh
    print(json.dumps({"moves": moves, "saved_from": mesh, "devices": jax.device_count()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
