import io

import pytest
from rich.console import Console

from andrea_jax import andrea_120m, count_parameters
from andrea_jax.inspect.parameter_table import parameter_table, sharding_table
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.settings import UserError
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.parallel import planned_mesh, sharded_abstract_state


def test_every_tensor_is_shown_with_its_shape_count_and_share():
    out = io.StringIO()
    Console(file=out, width=140).print(parameter_table(andrea_120m()))
    text = out.getvalue()
    assert f"{count_parameters(andrea_120m()):,} parameters" in text
    row = next(line for line in text.splitlines() if "blocks.mlp.w_1" in line)
    assert "12 x 768 x 3072" in row
    assert "28,311,552" in row
    assert "30.7%" in row
    assert "yes" in row


def test_each_tensor_names_its_optimizer():
    out = io.StringIO()
    Console(file=out, width=160).print(parameter_table(andrea_120m(), OptimizerConfig("muon")))
    lines = {line.split()[1]: line for line in out.getvalue().splitlines() if "│" in line}
    assert "muon" in lines["blocks.mlp.w_1"]
    assert "adamw" in lines["token_embedding"]


def printed(table):
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return {line.split()[1]: line for line in out.getvalue().splitlines() if "│" in line}, out.getvalue()


def sharded(mesh, kind="adamw", parallel="jit", **changes):
    """The table for a mesh of which this machine has one device."""
    model = andrea_120m(vocab_multiple=128, **changes)
    config = RunConfig(model, TrainConfig(parallel=parallel), optimizer=OptimizerConfig(kind), mesh=MeshConfig(*mesh))
    return printed(sharding_table(model, sharded_abstract_state(config, planned_mesh(config))))


def test_a_sharded_tensor_shows_its_part_and_its_bytes_on_each_device():
    lines, text = sharded((4, 8, 2))
    assert "over 64 devices: mesh.data = 4 x mesh.fsdp = 8 x mesh.expert = 1 x mesh.tensor = 2" in text
    assert "layer embed/fsdp heads/tensor qkv head_dim" in lines["blocks.attention.qkv"]
    assert "12 x 96 x 6 x 3 x 64" in lines["blocks.attention.qkv"]
    assert f"{12 * 96 * 6 * 3 * 64 * 4 * 3:,}" in lines["blocks.attention.qkv"]  # float32, with two moments
    assert "layer embed " in lines["blocks.mlp.b_2"]  # a vector that only fsdp could split is whole
    assert f"{12 * 768 * 4 * 3:,}" in lines["blocks.mlp.b_2"]
    assert "4288 x 96" in lines["token_embedding"]


def test_experts_show_their_axis_and_under_it_all_else_is_whole():
    lines, text = sharded((1, 2, 2, 4), n_expert=8)
    assert "mesh.data = 1 x mesh.fsdp = 2 x mesh.expert = 4 x mesh.tensor = 2" in text
    assert "layer expert/expert embed/fsdp expert_mlp/tensor" in lines["blocks.moe.w_1"]
    assert "12 x 2 x 384 x 1536" in lines["blocks.moe.w_1"]
    assert "layer embed/fsdp choice" in lines["blocks.moe.router"]


def test_the_bytes_of_the_table_are_all_that_a_device_holds():
    for mesh, kind in [((1, 8, 1), "adamw"), ((2, 2, 2), "muon"), ((4, 1, 1), "muon")]:
        lines, _ = sharded(mesh, kind)
        total = sum(int(line.split("│")[-2].replace(",", "")) for name, line in lines.items() if name != "all,")
        shown = int(lines["all,"].split("│")[-2].replace(",", ""))
        # the counts of steps, ours and the optimizer's, of four bytes; and Muon's count and three coefficients
        assert shown - total == (8 if kind == "adamw" else 24)
    whole, _ = sharded((8, 1, 1))
    assert f"{count_parameters(andrea_120m(vocab_multiple=128)) * 12 + 8:,}" in whole["all,"]


def test_muon_keeps_one_moment_of_a_matrix():
    lines, _ = sharded((1, 8, 1), "muon")
    assert f"{12 * 96 * 3072 * 4 * 2:,}" in lines["blocks.mlp.w_1"]
    assert f"{8576 * 96 * 4 * 3:,}" in lines["token_embedding"]


def test_under_pmap_every_device_holds_all():
    lines, _ = sharded((8, 1, 1), parallel="pmap")
    assert f"{12 * 768 * 3072 * 4 * 3:,}" in lines["blocks.mlp.w_1"]


@pytest.mark.parametrize(
    ("mesh", "parallel", "message"),
    [
        ((1, 7, 1), "jit", "d_model = 768 does not divide over mesh.fsdp = 7"),
        ((2, 2, 1), "pmap", "mesh.data alone"),
        ((2, 1, 1, 2), "pmap", "mesh.data alone, not mesh.expert = 2; 'jit' runs over any mesh"),
    ],
)
def test_a_planned_mesh_must_fit_the_model(mesh, parallel, message):
    with pytest.raises(UserError, match=message):
        sharded(mesh, parallel=parallel, n_expert=2 if len(mesh) > 3 else None)
