"""What XLA's flag for determinism does to the gradient of the token table, compiled for a named GPU."""

import jax
import jax.numpy as jnp
import pytest
from aot.gpu import compile_for

from andrea_jax.inspect.determinism import FINER, OPS
from andrea_jax.layers.embedding import embedding

pytestmark = pytest.mark.aot
TABLE = jax.ShapeDtypeStruct((4353, 384), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((8, 512), jnp.int32)


def gradient_text(**options):
    def gradient(table_VD, tokens_BT):
        return jax.grad(lambda table_VD: jnp.square(embedding(table_VD, tokens_BT)).sum())(table_VD)

    return compile_for("h200", gradient, TABLE, TOKENS, compiler_options=options).as_text()


def adds_in_order(text):
    """Whether every scatter writes each row once: then the order in which they come does not matter."""
    scatters = [line for line in text.splitlines() if " scatter(" in line]
    return all("unique_indices=true" in line for line in scatters)


def test_rows_of_equal_tokens_are_added_in_no_order_unless_the_flag_is_set():
    assert not adds_in_order(gradient_text())
    assert adds_in_order(gradient_text(**{OPS.removeprefix("--"): True}))
    assert adds_in_order(gradient_text(**{FINER[0].removeprefix("--"): True}))
