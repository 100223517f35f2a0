"""Every notebook runs, and its two forms say the same."""

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "experiments" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_equals_its_script(path):
    script, notebook = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_runs(path):
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert any(c.cell_type == "code" and c.outputs for c in notebook.cells)
