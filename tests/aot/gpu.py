"""Compiling for a GPU that is described, not present: XLA's CUDA plug-in and a description of the card are enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TARGETS = Path(__file__).parent / "targets"


def compile_for(card: str, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
    """f compiled for one `card` (a file in targets/); `args` are trees of anything with shape and dtype."""
    description = (TARGETS / f"{card}.txtpb").read_text()
    device = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=description).devices[0]
    sharding = SingleDeviceSharding(device)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(f, **jit_options).lower(*abstract).compile()
