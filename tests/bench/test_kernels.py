import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench import kernels
from bench.cases import Sizes, cases, names
from bench.compare import attempt, time_step
from bench.directions import direct
from bench.inputs import draw, exact
from bench.timing import relative_error

TINY = Sizes(rows=32, width=16, vocab=130)


@pytest.mark.parametrize("form", ["autodiff", "xla", "pallas"])
@pytest.mark.parametrize("name", names(TINY))
def test_every_form_of_an_operation_gives_what_the_formula_gives_in_float64(name, form):
    operation, direction = names(TINY)[name]
    case = cases(TINY)[operation]
    arguments = draw(operation, case, TINY.vocab, 0)
    dys, expected = exact(case, arguments, direction)
    f, arguments = direct(case.forms[form], arguments, direction, dys)
    found = jax.tree.leaves(jax.jit(f)(*arguments))
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert relative_error(found, expected) < 2 * float(jnp.finfo(jnp.bfloat16).eps)


def test_the_error_is_that_of_the_worst_result():
    assert relative_error([np.ones(4), None, np.full(4, 3.0)], [np.ones(4), np.ones(4), np.full(4, 2.0)]) == 0.5


def test_a_peer_that_cannot_is_named_with_its_problem():
    def prepare():
        raise RuntimeError("no such card\nmore")

    assert attempt("norm", "theirs", prepare, 1) == {
        "name": "norm",
        "form": "theirs",
        "problem": "RuntimeError: no such card",
    }


def test_the_command_times_what_is_named_and_writes_one_file(tmp_path, capsys):
    out = tmp_path / "new" / "times.json"
    kernels.main(["--small", "--samples", "2", "--out", str(out), "norm_backward"])
    result = json.loads(out.read_text())
    rows = {(row["name"], row["form"]): row for row in result["rows"]}
    for form in ("autodiff", "xla", "pallas"):
        row = rows["norm_backward", form]
        assert 0 < row["p50"] <= row["p95"] <= row["p99"]
        assert row["error"] < 0.01
        moved = 3 * 512 * 64 * 2
        assert math.isclose(row["GB/s"], moved / row["p50"] / 1e3)
    triton = rows["norm_backward", "jax_triton"]
    assert "p50" in triton or "implementation = 'jax_triton' cannot run" in triton["problem"]
    assert result["conditions"]["device"] == jax.devices()[0].device_kind
    assert "norm_backward" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_training_step_is_timed():
    rows = time_step("train_step", kernels.SMALL, True, 1)
    assert [row["form"] for row in rows] == ["xla", "auto"]
    for row in rows:
        assert math.isclose(row["tokens/s"], 512 / row["p50"] * 1e6)


def test_a_name_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        kernels.main(["--small", "norm_sideways"])
    assert "there is no norm_sideways to time" in capsys.readouterr().err
