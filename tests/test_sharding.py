import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import named_specs
from andrea_jax.settings import UserError
from andrea_jax.sharding import (
    AXES,
    MeshConfig,
    check_divides,
    constrain,
    local_rows,
    make_mesh,
    mesh_shape,
    named,
    place_batch,
    plan_mesh,
    row_shards,
    spec_sharding,
    use,
)


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [
        ((), 1, (1, 1, 1, 1)),
        ((), 8, (8, 1, 1, 1)),
        ((-1, 4), 8, (2, 4, 1, 1)),
        ((-1, 2, 2), 512, (128, 2, 1, 2)),
        ((1, -1), 6, (1, 6, 1, 1)),
        ((2, 1, -1), 8, (2, 1, 1, 4)),
        ((2, 1, 1, -1), 8, (2, 1, 4, 1)),
        ((2, 2, 4, 8), 128, (2, 2, 8, 4)),
    ],
)
def test_the_axes_fill_the_devices(sizes, devices, shape):
    """Settings are data, fsdp, tensor, expert; on the mesh `tensor` is innermost."""
    assert tuple(mesh_shape(MeshConfig(*sizes), devices).items()) == tuple(zip(AXES, shape, strict=True))
    assert tuple(plan_mesh(MeshConfig(*sizes), devices).shape.items()) == tuple(zip(AXES, shape, strict=True))


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ((-1, 3), 8, "mesh.fsdp = 3 x mesh.expert = 1 x mesh.tensor = 1: there are 8 devices, which 3 does not divide"),
        ((-1, 3), 8, "a product of 1, 2, 4, 8 does"),
        ((-1, 2), 1, "there is 1 device, which 2 does not divide; a product of 1 does"),
        ((2, 2, 1), 8, "takes 4 devices, and there are 8 devices; mesh.data = 4 would be right"),
        ((4, 4, 1), 8, "takes 16 devices, and there are 8 devices; mesh.data = 2 would be right"),
        ((2, 1, 2, 4), 8, "takes 16 devices, and there are 8 devices; mesh.data = 1 would be right"),
        (
            (1, 3),
            8,
            "mesh.data = 1 x mesh.fsdp = 3 x mesh.expert = 1 x mesh.tensor = 1 takes 3 devices, and there are 8",
        ),
    ],
)
def test_a_mesh_that_does_not_fill_the_devices_is_refused(sizes, devices, message):
    with pytest.raises(UserError) as error:
        mesh_shape(MeshConfig(*sizes), devices)
    assert message in str(error.value)


def test_on_a_cpu_it_is_said_how_to_have_more_devices():
    with pytest.raises(UserError, match=r"XLA_FLAGS=--xla_force_host_platform_device_count=8 makes a CPU 8 devices"):
        make_mesh(MeshConfig(fsdp=2), jax.devices()[:1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0,), "mesh.data = 0: must be at least 1, or -1 for what the others leave"),
        ((1, -2), "mesh.fsdp = -2: must be at least 1"),
        ((-1, -1), "mesh.data = -1 x mesh.fsdp = -1 x mesh.expert = 1 x mesh.tensor = 1: only one of them can be -1"),
        ((1, 1, 2.5), "mesh.tensor = 2.5: expected a whole number"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(UserError) as error:
        MeshConfig(*sizes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        ((-1, 8), 1, (1, 8, 1, 1)),
        ((16, 8, 2, 4), 1, (16, 8, 4, 2)),
        ((-1, 3), 8, (1, 3, 1, 1)),
        ((1, -1), 4, (1, 4, 1, 1)),
    ],
)
def test_a_planned_mesh_needs_no_devices(config, devices, shape):
    mesh = plan_mesh(MeshConfig(*config), devices)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.size == math.prod(shape)


@pytest.mark.parametrize(
    ("mesh", "changes", "batch", "message"),
    [
        (
            (8, 2),
            {},
            (24, 1),
            "train.batch_size = 24 does not divide over mesh.data x mesh.fsdp x mesh.expert = 16 devices; 32 would",
        ),
        (
            (8, 1, 4),
            {},
            (12, 1),
            "train.batch_size = 12 does not divide over mesh.data x mesh.fsdp x mesh.expert = 8 devices; 16 would",
        ),
        ((4, 1), {}, (8, 4), "= 4 devices x train.accumulate = 4; 16 would"),
        ((1, 36), {}, (36, 1), "ModelConfig.d_model = 48 does not divide over mesh.fsdp = 36; mesh.fsdp = 12 would"),
        ((1, 1, 8), {}, (1, 1), "ModelConfig.n_head = 12 does not divide over mesh.tensor = 8; mesh.tensor = 4 would"),
        ((2, 1, 1, 4), {"n_expert": 4}, (12, 1), "mesh.expert = 8 devices; 16 would"),
        ((1, 1, 1, 4), {}, (4, 1), "mesh.expert = 4 has no effect without ModelConfig.n_expert"),
        (
            (1, 1, 1, 4),
            {"n_expert": 6},
            (4, 1),
            "ModelConfig.n_expert = 6 does not divide over mesh.expert = 4; mesh.expert = 2 would",
        ),
        (
            (1, 1, 4),
            {"n_expert": 6, "expert_size": 10},
            (1, 1),
            "an expert's width = 10 does not divide over mesh.tensor = 4; mesh.tensor = 2 would",
        ),
        (
            (1, 1, 4),
            {"vocab_size": 65},
            (1, 1),
            "the vocabulary of 65 does not divide over mesh.tensor = 4; ModelConfig.vocab_multiple = 4 pads it",
        ),
        (
            (1, 1, 4),
            {"vocab_size": 65, "vocab_multiple": 6},
            (1, 1),
            "vocabulary of 66 does not divide over mesh.tensor = 4; ModelConfig.vocab_multiple = 12",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_would(mesh, changes, batch, message):
    mesh = plan_mesh(MeshConfig(*mesh), 1)
    model = ModelConfig(**{"vocab_size": 64, "d_model": 48, "n_head": 12, "n_layer": 1} | changes)
    with pytest.raises(UserError) as error:
        check_divides(mesh, model, *batch)
    assert message in str(error.value)


def test_what_divides_passes():
    for sizes in [(1, 1, 1), (4, 2, 1), (2, 2, 4), (1, 8, 12)]:
        mesh = plan_mesh(MeshConfig(*sizes), 1)
        check_divides(mesh, ModelConfig(vocab_size=96, d_model=48, n_head=12), 16, 2)
        assert row_shards(mesh) == sizes[0] * sizes[1]
    mesh = plan_mesh(MeshConfig(2, 2, 4, 3), 1)  # three of six experts, which four do not divide
    check_divides(mesh, ModelConfig(vocab_size=96, d_model=48, n_head=12, n_expert=6), 24, 2)
    assert row_shards(mesh) == 12


def test_logical_names_become_axes_of_the_mesh():
    mesh = plan_mesh(MeshConfig(2, 2, 2), 8)
    assert named(mesh, "batch", None, "mlp").spec == P(("data", "fsdp", "expert"), None, "tensor")
    assert named(mesh, "batch", None, "mlp").shard_shape((8, 3, 6)) == (2, 3, 3)


def test_matrices_are_split_over_fsdp_and_tensor_and_vectors_over_tensor_alone():
    mesh = plan_mesh(MeshConfig(2, 4, 3), 24)
    expected = {
        "blocks.attention.qkv": (2, 12, 4, 3, 4),
        "blocks.attention.out": (2, 4, 4, 12),
        "blocks.attention.b_qkv": (2, 4, 3, 4),
        "blocks.attention.b_out": (2, 48),
        "blocks.attention_norm.gain": (2, 48),
        "blocks.attention_norm.shift": (2, 48),
        "blocks.mlp_norm.gain": (2, 48),
        "blocks.mlp_norm.shift": (2, 48),
        "blocks.mlp.w_1": (2, 12, 64),
        "blocks.mlp.b_1": (2, 64),
        "blocks.mlp.w_2": (2, 64, 12),
        "blocks.mlp.b_2": (2, 48),
        "final_norm.gain": (48,),
        "final_norm.shift": (48,),
        "position_embedding": (8, 12),
        "token_embedding": (22, 12),
        "head": (12, 22),
    }
    model = ModelConfig(
        vocab_size=64,
        context_length=8,
        d_model=48,
        n_layer=2,
        n_head=12,
        attention_bias=True,
        vocab_multiple=6,
        tie_embeddings=False,
    )
    assert parts_of(mesh, model) == expected


def parts_of(mesh, model):
    specs = named_specs(model).items()
    return {name: spec_sharding(mesh, spec.axes).shard_shape(spec.shape) for name, spec in specs}


def test_experts_are_split_over_expert_too_of_which_all_others_are_copies():
    model = ModelConfig(
        vocab_size=96, d_model=48, n_layer=2, n_head=12, n_expert=10, expert_size=9, n_shared_expert=2, balance_bias=0.1
    )
    found = parts_of(plan_mesh(MeshConfig(2, 4, 3, 5), 120), model)
    same = parts_of(plan_mesh(MeshConfig(10, 4, 3), 120), model)
    mixture = "blocks.moe."
    assert {name: part for name, part in found.items() if part != same[name]} == {
        mixture + "w_1": (2, 2, 12, 3),
        mixture + "w_2": (2, 2, 3, 12),
        mixture + "b_1": (2, 2, 3),
        mixture + "b_2": (2, 2, 12),
    }
    assert (found[mixture + "router"], found[mixture + "router_bias"]) == ((2, 12, 10), (2, 10))
    assert (found[mixture + "shared.w_1"], found[mixture + "shared.b_2"]) == ((2, 12, 6), (2, 48))


def test_one_process_has_all_rows_of_a_batch():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert local_rows(mesh, 6) == slice(0, 6)
    tokens = jax.numpy.arange(12).reshape(6, 2)
    placed = place_batch({"tokens_BT": tokens[local_rows(mesh, 6)]}, mesh, 6)["tokens_BT"]
    assert placed.sharding.is_equivalent_to(named(mesh, "batch", None), 2)
    assert (placed == tokens).all()


def test_one_device_or_no_mesh_leaves_the_program_as_it_is():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    x = jax.numpy.ones((2, 3))
    for one in (None, mesh):
        assert constrain(x, one, "batch", None) is x
        program = jax.make_jaxpr(lambda x, one=one: use(x, x.dtype, one, "embed", "mlp") * 2)(x)
        assert [eqn.primitive.name for eqn in program.eqns] == ["mul"]
