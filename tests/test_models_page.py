"""docs/models.md says what the code counts."""

from pathlib import Path

import models
import pytest
from gin_settings import CONFIGS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_the_page_is_what_the_script_prints():
    assert PAGE.read_text() == models.page({kind: models.models(kind) for kind in models.TITLES}) + "\n"


def test_every_file_of_a_model_is_on_it():
    others = {"tinyshakespeare", "tinyshakespeare_nanogpt", "plan_7b"}  # corpora, and one to plan with
    listed = {row["name"] for kind in models.TITLES for row in models.models(kind)}
    assert listed == {path.stem for path in CONFIGS.glob("*.gin")} - others


def test_the_row_of_andrea_12m_by_hand():
    row = models.row("andrea_12m")
    D, L, V, T = 384, 6, 4353, 1024
    matrices = L * 12 * D * D
    # tables; each block's two norms and the MLP's biases; the last norm
    assert row["parameters"] == (V + T) * D + matrices + L * (4 * D + 5 * D) + 2 * D
    assert row["without_tables"] == row["parameters"] - (V + T) * D
    assert row["flops_per_token"] == 6 * (matrices + D * V) + L * 6 * T * D
    assert row["tokens"] == 43_587 * 8 * T
    assert row["flops"] == row["tokens"] * row["flops_per_token"]


@pytest.mark.parametrize("name", ["variant_moe", "variant_llama"])
def test_what_a_file_says_of_itself_is_its_first_comment(name):
    first, second = (CONFIGS / f"{name}.gin").read_text().splitlines()[:2]
    assert first == "# The default run with another block."
    assert models.about(name).startswith(second.removeprefix("# "))
