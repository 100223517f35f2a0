"""A mesh that does not fit the devices, the model or the batch, as a user of eight virtual CPU devices meets it."""

import pytest
from end_to_end.scripts import refused, settings, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    write_text(folder / "text.txt")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh__fsdp=3), "there are 8 devices, which 3 does not divide; a product of 1, 2, 4, 8 does"),
        (dict(mesh__data=2), "takes 2 devices, and there are 8 devices; mesh.data = 8 would be right"),
        (dict(mesh__data=-1, mesh__fsdp=-1), "only one of them can be -1"),
        (dict(mesh__tensor=0), "mesh.tensor = 0: must be at least 1"),
        (
            dict(train__batch_size=12),
            "train.batch_size = 12 does not divide over mesh.data x mesh.fsdp x mesh.expert = 8 devices; 16",
        ),
        (dict(train__batch_size=8, train__accumulate=2), "8 devices x train.accumulate = 2; 16 would"),
        (dict(mesh__fsdp=8, ModelConfig__d_model=20), "d_model = 20 does not divide over mesh.fsdp = 8; mesh.fsdp = 4"),
        (dict(mesh__tensor=4), "ModelConfig.n_head = 2 does not divide over mesh.tensor = 4; mesh.tensor = 2 would"),
        (
            dict(mesh__tensor=2),
            "the vocabulary of 257 does not divide over mesh.tensor = 2; ModelConfig.vocab_multiple = 2",
        ),
        (dict(mesh__fsdp=2, train__parallel="'pmap'"), "'pmap' runs over mesh.data alone, not mesh.fsdp = 2"),
    ],
)
def test_a_wrong_mesh_is_refused_before_anything_compiles(folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    flags = settings(folder, **{"train__run_dir": tmp_path / "run", "train__batch_size": 8} | changes)
    assert message in refused("train.py", *flags)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_one_device_is_told_how_to_be_several(folder, tmp_path):
    message = refused("train.py", *settings(folder, train__run_dir=tmp_path / "run", mesh__fsdp=2))
    assert "there is 1 device, which 2 does not divide" in message
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=8" in message
