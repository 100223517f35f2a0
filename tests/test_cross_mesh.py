"""A checkpoint is restored over any other mesh, bit by bit, and training goes on with the next batch."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_mesh_program import MESHES, MODEL, B, tokens

from andrea_jax import UserError
from andrea_jax.checkpoint import open_for_saving, read_tensors, restore_state, save, saved_tensors
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.data.windows import make_batches
from andrea_jax.train.config import RunConfig
from andrea_jax.train.state import abstract_state, init_state

EPS = 2.0**-23


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process with eight devices saw: 8 (fsdp) -> 4 (data x tensor) -> 1 -> 8 (all three) -> 4 (pmap)."""
    folder = tmp_path_factory.mktemp("cross") / "checkpoints"
    quickly_compiled = "--xla_backend_optimization_level=0"  # the programs run for a few steps only
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {quickly_compiled}"}
    program = str(Path(__file__).with_name("cross_mesh_program.py"))
    done = subprocess.run([sys.executable, program, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"folder": folder}


def test_every_tensor_comes_back_bit_by_bit_on_every_mesh(found):
    assert found["devices"] == 8
    assert [move["step"] for move in found["moves"]] == [3, 5, 7, 9]
    for move in found["moves"]:
        assert move["tensors"] > 30
        assert move["equal"] == move["tensors"]


def test_the_state_lies_as_each_mesh_says(found):
    split = [math.prod((mesh.fsdp, mesh.tensor)) for _, mesh in MESHES[1:]]
    expected = [[devices, 1 / parts] for (devices, _), parts in zip(MESHES[1:], split, strict=True)]
    assert [move["lies"] for move in found["moves"]] == [*expected, [4, 1.0]]
    assert found["saved_from"] == {"data": 1, "fsdp": 8, "expert": 1, "tensor": 1}


def test_the_next_loss_is_equal_to_rounding(found):
    """n terms in another order: sqrt(n) roundings; each goes through about 8 sums a block and 8 more."""
    n = B * MODEL.context_length
    limit = EPS * (math.sqrt(n) + 8 * (MODEL.n_layer + 1) / math.sqrt(n))
    for move in found["moves"]:
        stayed, moved = move["losses"]
        assert abs(stayed - moved) <= limit * stayed


def test_batches_go_on_where_they_were(found):
    batches = make_batches(tokens, B, MODEL.context_length, 0)
    for move in found["moves"]:
        assert move["same_batch"]
        np.testing.assert_array_equal(move["next_batch"], batches[move["step"] + 1]["tokens_BT"])


def test_one_device_reads_what_eight_wrote_without_knowing_the_settings(found):
    specs = saved_tensors(found["folder"], 9, "optimizer")
    tensors = read_tensors(found["folder"], 9, "optimizer")
    assert specs.keys() == tensors.keys()
    assert {name: (x.shape, x.dtype.name) for name, x in tensors.items()} == {n: s[:2] for n, s in specs.items()}


CONFIG = RunConfig(model=MODEL)
META = {"model": dataclasses.asdict(CONFIG.model), "tokenizer": bytes_tokenizer().to_dict(), "settings": {}}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    with open_for_saving(folder, 1) as manager:
        save(manager, dataclasses.replace(init_state(CONFIG), step=jnp.int32(1)), META, None)
    return folder


def wanting(item, name, change):
    """The abstract state, one of its tensors changed."""
    state = abstract_state(CONFIG)

    def replace(path, x):
        return change(x) if jax.tree_util.keystr(path, simple=True, separator=".").endswith(name) else x

    return state.replace(**{item: jax.tree.map_with_path(replace, getattr(state, item))})


@pytest.mark.parametrize(
    ("item", "name", "change", "message"),
    [
        (
            "params",
            "blocks.mlp.w_1",
            lambda x: jax.ShapeDtypeStruct((1, 32, 64), x.dtype),
            r"params blocks.mlp.w_1 is float32\[1, 32, 128\], expected float32\[1, 32, 64\]",
        ),
        (
            "params",
            "final_norm.gain",
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            r"params final_norm.gain is float32\[32\], expected bfloat16\[32\]",
        ),
        (
            "optimizer",
            "mu.token_embedding",
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            r"optimizer .*mu.token_embedding is float32\[260, 32\], expected bfloat16\[260, 32\]",
        ),
        (
            "optimizer",
            "mu.token_embedding",
            lambda x: {"part": x},
            r"optimizer .*mu.token_embedding.part is not in it, expected float32\[260, 32\] \(and 1 more\)",
        ),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(small, item, name, change, message):
    with pytest.raises(UserError, match=r"1 cannot be restored: " + message):
        restore_state(small, 1, wanting(item, name, change))
