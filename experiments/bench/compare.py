"""Every form of a benchmarked operation, ours and other people's: its error on a few rows, and its time on all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from bench import torch_peers
from bench.cases import TRITON, Case, Sizes, cases, names
from bench.directions import direct
from bench.inputs import draw, exact, nbytes
from bench.jax_peers import jax_peers
from bench.timing import relative_error, sample, sets

Row = dict[str, Any]
FORMS = ("autodiff", "xla", "pallas")
CHECKED = 256  # rows of the comparison with float64


def time_operation(name: str, sizes: Sizes, samples: int) -> list[Row]:
    """A row for each form and each peer that is installed; one that cannot run here says why."""
    operation, direction = names(sizes)[name]
    case = cases(sizes)[operation]
    few = cases(sizes._replace(rows=min(sizes.rows, CHECKED)))[operation]
    inputs = partial(draw, operation, V=sizes.vocab)
    arguments = inputs(few, seed=0)
    dys, reference = exact(few, arguments, direction)

    def prepare_jax(f: Callable[..., Any]) -> tuple[float, Any, Any]:
        function, checked = direct(f, arguments, direction, dys)
        error = relative_error(jax.tree.leaves(jax.jit(function)(*checked)), reference)
        function, first = direct(f, inputs(case, seed=1), direction)
        rest = [
            direct(f, inputs(case, seed=n), direction)[1]
            for n in range(2, 1 + sets(nbytes(first), jax.default_backend()))
        ]
        compiled, rotated = jax.jit(function), [first, *rest]
        return error, lambda n: compiled(*rotated[n % len(rotated)]), jax.block_until_ready

    def prepare_torch(f: Callable[..., Any]) -> tuple[float, Any, Any]:
        V = sizes.vocab if operation == "cross_entropy" else None
        tensors, torch_dys = torch_peers.to_torch(arguments, V), torch_peers.to_torch(dys)
        found = torch_peers.direct(f, tensors, direction, torch_dys)()
        error = relative_error(torch_peers.from_torch(found, V, case.arguments[1].shape[-1]), reference)
        calls = [
            torch_peers.direct(f, torch_peers.to_torch(inputs(case, seed=n), V), direction, None)
            for n in range(1, 1 + sets(nbytes(case.arguments), jax.default_backend()))
        ]
        return error, lambda n: calls[n % len(calls)](), torch_peers.finish

    forms = (*FORMS, "jax_triton") if operation in TRITON and direction == "backward" else FORMS
    ours = {form: case.forms[form] for form in forms} | jax_peers(sizes.vocab).get(operation, {})
    rows = [attempt(name, form, partial(prepare_jax, f), samples) for form, f in ours.items()]
    theirs = torch_peers.torch_peers().get(operation, {})
    rows += [attempt(name, form, partial(prepare_torch, f), samples) for form, f in theirs.items()]
    for row in rows:
        if "p50" in row:
            row["GB/s"] = least_bytes(case, direction) / row["p50"] / 1e3
    return rows


def least_bytes(case: Case, direction: str) -> float:
    return case.floors[direction] * case.unit


def time_step(name: str, sizes: Sizes, small: bool, samples: int) -> list[Row]:
    """A row for the whole training step in XLA's forms, and one for what `auto` runs; needs optax and flax."""
    from bench.steps import running_step, step_config

    rows = []
    for form in ("xla", "auto"):
        config = step_config(name, form, sizes.rows, small)
        row = attempt(name, form, lambda c=config: (None, running_step(c), jax.block_until_ready), samples)
        if "p50" in row:
            row["tokens/s"] = config.train.batch_size * config.model.context_length / row["p50"] * 1e6
        rows.append(row)
    return rows


def attempt(name: str, form: str, prepare: Callable[[], tuple[float | None, Any, Any]], samples: int) -> Row:
    """Error and times of one form, or the problem: a peer that cannot, or too little memory."""
    row: Row = {"name": name, "form": form}
    try:
        error, call, finish = prepare()
        return row | {"error": error, **sample(call, finish, samples)}
    except Exception as problem:
        return row | {"problem": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
