"""Every tensor's shape, count, share and optimizer, as a table to print."""

from __future__ import annotations

import math

from rich.table import Table

from andrea_jax.config import ModelConfig
from andrea_jax.optimizer import OptimizerConfig, group_of
from andrea_jax.parameters import Spec, count_parameters, map_specs


def parameter_table(config: ModelConfig, optimizer: OptimizerConfig | None = None) -> Table:
    """A rich table of all tensors, from the specs; nothing is allocated. With `optimizer` also who steps each."""
    total = count_parameters(config)
    table = Table(title=f"{total:,} parameters", title_justify="left")
    table.add_column("tensor")
    table.add_column("axes")
    for heading in ("shape", "parameters", "share"):
        table.add_column(heading, justify="right")
    table.add_column("decayed")
    if optimizer:
        table.add_column("optimizer")

    def add(name: str, spec: Spec) -> None:
        count = math.prod(spec.shape)
        shape = " x ".join(map(str, spec.shape))
        cells = [name, " ".join(spec.axes), shape, f"{count:,}", f"{count / total:.1%}", "yes" if spec.decayed else ""]
        table.add_row(*cells, *([group_of(optimizer, spec)] if optimizer else []))

    map_specs(add, config)
    return table
