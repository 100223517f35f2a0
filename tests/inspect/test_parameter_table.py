import io

from rich.console import Console

from andrea_jax import andrea_120m, count_parameters
from andrea_jax.inspect.parameter_table import parameter_table
from andrea_jax.optimizer import OptimizerConfig


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
