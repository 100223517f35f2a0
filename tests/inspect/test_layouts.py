import dataclasses

import pytest

from andrea_jax import ModelConfig, UserError
from andrea_jax.inspect.layouts import Devices, environment_of, parse_layouts
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig

CONFIG = RunConfig(
    model=ModelConfig(vocab_size=258, d_model=32, n_head=4, n_layer=1, context_length=8),
    train=TrainConfig(batch_size=8),
    mesh=MeshConfig(fsdp=4),
)
CPU, GPUS = Devices("cpu", "cpu", 1), Devices("gpu", "NVIDIA H100", 4)


def test_counts_meshes_and_pmap_are_read():
    found = parse_layouts("8,4:data=2:tensor=2,2:pmap,1", CONFIG, CPU)
    assert [str(layout) for layout in found] == [
        "8 (data 2 x fsdp 4)",
        "4 (data 2 x tensor 2)",
        "2 (data 2, pmap)",
        "1",
    ]
    assert [layout.parallel for layout in found] == ["jit", "jit", "pmap", "jit"]


def test_experts_have_an_axis():
    model = dataclasses.replace(CONFIG.model, n_expert=4)
    (layout,) = parse_layouts("4:expert=2:tensor=2", dataclasses.replace(CONFIG, model=model), CPU)
    assert str(layout) == "4 (expert 2 x tensor 2)"
    assert layout.changes()["mesh"] == {"data": -1, "fsdp": 1, "tensor": 2, "expert": 2}


def test_without_devices_the_settings_decide():
    (layout,) = parse_layouts("", dataclasses.replace(CONFIG, mesh=MeshConfig()), GPUS)
    assert (layout.devices, str(layout)) == (4, "4 (data 4)")


def test_virtual_devices_on_cpu_and_the_first_ones_of_gpus():
    eight, one = parse_layouts("8,1", CONFIG, CPU)
    assert environment_of(one, {"A": "b"}, CPU) == {"A": "b"}
    flag = "--xla_force_host_platform_device_count"
    assert environment_of(eight, {"XLA_FLAGS": f"{flag}=1 --xla_x=2"}, CPU)["XLA_FLAGS"] == f"{flag}=8 --xla_x=2"
    (two,) = parse_layouts("2", CONFIG, GPUS)
    assert environment_of(two, {}, GPUS)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment_of(two, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, GPUS)["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh.fsdp = 4"),
        ("four", "--devices=four: expected a number of devices, such as 4"),
        ("0", "--devices=0: expected"),
        ("4:rows=2", "--devices=4:rows=2: expected"),
        ("4:fsdp=two", "expected"),
        ("8:fsdp=3", "mesh.fsdp = 3"),
        ("3", "train.batch_size = 8 does not divide over mesh.data x mesh.fsdp x mesh.expert = 3"),
        ("8:expert=2", "mesh.expert = 2 has no effect without ModelConfig.n_expert"),
        ("8:tensor=8", "ModelConfig.n_head = 4 does not divide over mesh.tensor = 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_layouts(text, CONFIG, CPU)
    assert message in str(caught.value)


def test_more_gpus_than_there_are():
    with pytest.raises(UserError, match="8 are asked for, there are 4 x NVIDIA H100"):
        parse_layouts("8", CONFIG, GPUS)
